"""Silent errors that the peer TrainCheck lists, and what `traindiff check` says of them."""
