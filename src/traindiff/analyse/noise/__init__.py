"""Noise floors: how far two correct runs may differ at a site, from rounding or measured. Needs no framework."""
