"""Other tools' files, read into recordings and written from them."""
