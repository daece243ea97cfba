"""The proof before the run: a program is refused here, or it can neither break a rule nor stand still."""

from pipedream.verifier.proof import Proof, verify

__all__ = ["Proof", "verify"]
