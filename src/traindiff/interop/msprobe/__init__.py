"""The files of msprobe's gradient monitor: read, written, and converted to recordings and back."""
