"""The picture of a profile: a column for each layer, its forward below its backward."""

from __future__ import annotations

from html import escape

from pipedream.core.model.profile import Profile
from pipedream.core.units import format_number, format_seconds
from pipedream.report.axis import length, ticks, time_unit
from pipedream.report.style import COLOURS
from pipedream.report.svg import frame, text

_LEFT, _RIGHT, _TOP, _FOOT, _HEIGHT = 64, 16, 34, 34, 150


def profile_svg(profile: Profile, *, width_px: float = 720) -> str:
    """Returns the picture of the seconds of each layer, for one minibatch."""
    rows = zip(profile.graph.layers, profile.layers, strict=True)
    passes = [(layer.name, cost.forward_s, cost.backward_s) for layer, cost in rows]
    most_s = max(forward_s + backward_s for _, forward_s, backward_s in passes) or 1.0
    unit, size = time_unit(most_s)
    wide, bottom = (width_px - _LEFT - _RIGHT) / len(passes), _TOP + _HEIGHT
    parts = [text(_LEFT, 21, f"{profile.model}: seconds of each layer", size=14, weight=600)]
    for tick in ticks(0.0, most_s / size, 5):
        y = bottom - tick * size / most_s * _HEIGHT
        parts.append(
            f'<line class="tick" x1="{_LEFT}" x2="{length(width_px - _RIGHT)}" y1="{length(y)}" y2="{length(y)}" '
            f'stroke="{COLOURS["line"][0]}"/>'
        )
        parts.append(text(_LEFT - 8, y + 4, f"{format_number(tick)} {unit}", colour="faint", anchor="end"))
    for i, (name, *seconds) in enumerate(passes):
        y = bottom
        for colour, word, pass_s in zip(("F0", "B0"), ("forward", "backward"), seconds, strict=True):
            tall = pass_s / most_s * _HEIGHT
            y -= tall
            parts.append(
                f'<rect class="{colour}" x="{length(_LEFT + i * wide)}" y="{length(y)}" '
                f'width="{length(max(wide - 1, 0.5))}" height="{length(tall)}" fill="{COLOURS[colour][0]}">'
                f"<title>{escape(name)}: {word} {format_seconds(pass_s)}</title></rect>"
            )
    words = f"{len(passes)} layers, from {passes[0][0]} to {passes[-1][0]}; forward blue, backward green"
    parts.append(text(_LEFT, bottom + 20, words, colour="faint"))
    return frame("".join(parts), width_px, bottom + _FOOT, f"Profile of {profile.model}", standalone=True)
