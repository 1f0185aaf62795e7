"""What coding agents use: a server of the Model Context Protocol."""
