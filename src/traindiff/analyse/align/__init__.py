"""Two runs brought together, site by site, and what must be equal to the bit. Needs no framework."""
