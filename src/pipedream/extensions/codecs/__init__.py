"""Encodings of the tensors in messages, one file for each; `pipedream.core.plan.codec` finds them."""
