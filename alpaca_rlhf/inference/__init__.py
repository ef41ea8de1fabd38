"""Tier 3: talking with what the steps have made, in a terminal or a browser; both share everything but their looks."""
