"""alpaca-rlhf: from a base language model to one that people prefer, in three steps.

tier 3  demo, evaluation            the doors: they start programs and read what the steps wrote
tier 2  deepspeed_chat/training/step1…3   one loop each, visible in its main.py; they meet through files on disk only
tier 1  engines, rollout, runtime, deepspeed_chat/training/utils   how a model is held, sampled, saved and fed
tier 0  arguments, algorithms       settings without torch, formulas without I/O

A file imports from tiers below its own, and inside its tier only from its own folder (tests/test_architecture.py).
"""
