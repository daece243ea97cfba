"""The proof before the run: a program that passes can neither break a rule nor deadlock."""

from pipedream.verifier.proof import Proof, verify

__all__ = ["Proof", "verify"]
