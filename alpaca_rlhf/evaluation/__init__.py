"""Tier 3: programs that read finished models and say how they differ."""
