"""The MessageEncoding: the encoding of tensors between workers, and its costs.

Only floating-point tensors with a gradient are encoded, and their gradients. Masks, tables of angles, integers, targets
and tensors below `MIN_ENCODED_BYTES` are sent unchanged; plans count these as encoded, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pipedream.core.door import is_file
from pipedream.core.errors import PipelineError
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.choice import Choice
from pipedream.core.plan.codec import CODECS, FULL, list_encodings
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.placement import Carries
from pipedream.core.units import format_bytes


@dataclass(frozen=True)
class MessageEncoding(Choice):
    """The encodings of activations and of gradients, names of `Codec` or 'full'.

    Attributes:
        evaluations: the encoding of activations in evaluations and predictions.
        value_bits: bits of a value that is not encoded.
    """

    approximates: ClassVar[bool] = True
    option = "messages"
    help = (
        "Encoding of what crosses between workers: full, bfloat16, float16, int8, int4 or int4_stochastic; or two of "
        "them, for activations and their gradients; a third one is for evaluations, which are full by default."
    )
    activations: str = FULL
    gradients: str = FULL
    evaluations: str = FULL
    value_bits: int = 32

    def __post_init__(self) -> None:
        for name in (self.activations, self.gradients, self.evaluations):
            if name != FULL and not (is_file(name) or CODECS.has(name)):
                raise PipelineError(
                    f"messages={name!r} was asked for; the encodings are {', '.join([FULL, *list_encodings()])}, or "
                    "FILE.py with one of yours: one, or ACTIVATIONS,GRADIENTS or ACTIVATIONS,GRADIENTS,EVALUATIONS"
                )

    @classmethod
    def list_texts(cls) -> str:
        return "ENCODING[,ENCODING[,ENCODING]]"

    @classmethod
    def read(cls, value: Any) -> MessageEncoding:
        """Reads a user's choice, as `parse` does, and opens the files that it names."""
        messages = cls.parse(value)
        for name in filter(is_file, () if messages is value else messages.names):
            CODECS.open_file(name)
        return messages

    @classmethod
    def parse(cls, value: str | Sequence[str] | MessageEncoding | None, value_bits: int = 32) -> MessageEncoding:
        """Reads a choice: ``"int8"``, ``"int8,bfloat16"``, ``("int8", "bfloat16")`` or ``"int8,int8,int8"``.

        Raises:
            PipelineError: no such encoding.
        """
        if isinstance(value, MessageEncoding):
            return value
        names = value.split(",") if isinstance(value, str) else list(value or [FULL])
        if len(names) > 3 or not all(isinstance(name, str) for name in names):
            raise PipelineError(
                f"messages={value!r} was asked for; give one encoding, or two: activations, gradients; or a third for "
                "evaluations"
            )
        names = [name.strip() for name in names]
        pair, evaluations = (names[:2], names[2]) if len(names) > 2 else (names, FULL)
        return cls(pair[0], pair[-1], evaluations, value_bits)

    def check_opened(self) -> None:
        """Raises a `PipelineError` if an encoding is a file that the user has not named."""
        for name in self.names:
            self._share(name)

    def __bool__(self) -> bool:
        return self.names != (FULL,)

    def __str__(self) -> str:
        if self.evaluations != FULL:
            return f"{self.activations},{self.gradients},{self.evaluations}"
        return ",".join(dict.fromkeys((self.activations, self.gradients)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.activations, self.gradients, self.evaluations)))

    def of_values(self, bits: int) -> MessageEncoding:
        return replace(self, value_bits=bits)

    def encoding(self, carries: Carries) -> str:
        return {Carries.ACTIVATION: self.activations, Carries.GRADIENT: self.gradients}.get(carries, FULL)

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        activation_share, gradient_share = self.shares
        before = terms.message_shares
        return terms._replace(message_shares=(before[0] * activation_share, before[1] * gradient_share))

    def describe(self, plan: Any) -> Iterator[str]:
        if self and len(plan.stages) > 1:
            sizes = [format_bytes(stage.output_bytes * plan.costs.message_share) for stage in plan.stages[:-1]]
            yield f"messages: {self}, {', '.join(sizes)} each way in the mean (approximate)"
        if self.evaluations != FULL:
            yield f"evaluations: activations travel in {self.evaluations} (approximate)"

    def wrap_sender(self, sender: Any, carries: Carries) -> Any:
        from pipedream.extensions.choices.messages import encoded

        return encoded.with_encoding(sender, self.encoding(carries), self._encoding_of_evaluations(carries), carries)

    def wrap_receiver(self, receiver: Any, carries: Carries) -> Any:
        from pipedream.extensions.choices.messages import encoded

        encodings = self.encoding(carries), self._encoding_of_evaluations(carries)
        return encoded.with_decoding(receiver, *encodings)

    def imitate_message(self, tensor: Any) -> Any:
        from pipedream.extensions.choices.messages import encoded

        return encoded.apply_messages(tensor, self.activations, self.gradients)

    @property
    def shares(self) -> tuple[float, float]:
        """Bytes on the wire for each byte of an activation, and of a gradient."""
        return self._share(self.activations), self._share(self.gradients)

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        """Returns costs for each byte before encoding, the mean of an activation and its gradient."""
        if not self:
            return runtime
        added_s = 0.0
        for encoding in (self.activations, self.gradients):
            like = encoding if encoding == FULL else CODECS.find(encoding).costs_like or encoding
            saved_s = (1 - self._share(encoding)) * runtime.message_s_per_byte
            added_s += runtime.encodings_s_per_byte.get(like, 0.0) - saved_s
        return replace(runtime, encoding_s_per_byte=added_s / 2)

    def _encoding_of_evaluations(self, carries: Carries) -> str:
        return self.evaluations if carries == Carries.ACTIVATION else FULL

    def _share(self, encoding: str) -> float:
        return 1.0 if encoding == FULL else min(1.0, CODECS.find(encoding).bits / self.value_bits)


CHOICES = (MessageEncoding(),)
