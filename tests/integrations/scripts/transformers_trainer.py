"""A small GPT-2 under the Trainer: two micro-batches in a step, evaluated after each step, best weights loaded."""

import sys

import torch
import transformers
from torch.utils.data import Dataset


class Texts(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


transformers.set_seed(3)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
)
arguments = transformers.TrainingArguments(
    output_dir="output", max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
    report_to=[], disable_tqdm=True, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps",
    save_steps=2, load_best_model_at_end=True, warmup_steps=2, weight_decay=0.1,
)  # fmt: skip
transformers.Trainer(model=model, args=arguments, train_dataset=Texts(24), eval_dataset=Texts(8)).train()
torch.save(model.state_dict(), sys.argv[1])
