"""How far apart two correct runs may be at a site: from rounding, and measured by replicas. Needs no framework."""
