"""One observed kind of thing per file. A tap only reads, and leaves no trace when it is removed."""
