"""Watch one training: the last frames, the origin of the first NaN, and the module that made it, to be run again."""
