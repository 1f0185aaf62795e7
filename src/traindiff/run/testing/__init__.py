"""traindiff in tests. Users import it as `traindiff.testing`."""
