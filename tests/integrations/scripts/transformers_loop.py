"""A small Llama in a loop of its own, with a schedule; it writes a text after each step, and draws its words."""

import sys

import torch
import transformers

transformers.set_seed(3)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = transformers.get_scheduler("linear", optimizer=optimizer, num_warmup_steps=1, num_training_steps=4)
for tokens in torch.randint(64, (4, 4, 12)):
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    model.eval()
    model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=True, pad_token_id=0)
torch.save(model.state_dict(), sys.argv[1])
