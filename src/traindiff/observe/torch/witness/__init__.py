"""What inputs and outputs of layers give for the gradients of their weights, and what these gradients give."""
