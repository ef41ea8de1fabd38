"""What is this model, and what would a step do with it and with these data: ``python -m alpaca_rlhf.doctor MODEL``."""
