"""How parallel engines lay out tensors over ranks: which part of a global tensor a rank holds, and how parts merge."""
