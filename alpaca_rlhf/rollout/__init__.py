"""Tier 1: prompts in, responses out. A rollout is handed a module; it knows no engine and no trainer."""
