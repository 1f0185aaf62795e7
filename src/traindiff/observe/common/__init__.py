"""What sessions of every framework share. Needs no framework."""
