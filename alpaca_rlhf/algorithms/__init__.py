"""The mathematics of RLHF: tensors and numbers in, tensors and numbers out. Imports torch only.

Words
-----
``prompt`` + ``response`` = ``sequence``. Prompts are padded on the left, responses on the right.
``attention_mask``, ``response_mask``
    1 = counts, 0 = does not. The EOS token counts. There is no mask in the other sense. What stands at a masked
    position, even NaN, reaches no result and no gradient.
``log_probs``, ``old_log_probs``, ``ref_log_probs``
    natural logarithms (nats) under the policy being trained, the policy that sampled, the reference.
``values``, ``returns``, ``advantages``
    one number per action. ``scores``: one per sequence, from the reward model. ``rewards``: per action, after the
    KL penalty.
``kl_coef`` is the number, ``kl_controller`` the object that moves it.

Shapes
------
``B`` batch, ``P`` prompt width, ``R`` response width, ``S`` = P + R, ``V`` vocabulary, ``H`` hidden, ``N`` any
number of tokens or scores, ``()`` one number. Action t is the token at position P + t of the sequence; its log-prob
and its value are read at position P + t - 1, so both are known before the token is.

Conventions
-----------
Everything is computed in float32, statistics in float64, whatever comes in. Losses are sums over the counted tokens;
the caller divides once, by the count of the whole optimizer step over all ranks. A wrong argument raises ValueError.
``docs/MATHS.md`` lists every formula with its function, its test and its paper.
"""
