"""The best plan of all, its memory counted with all its messages: the oracle of `pipedream.planner.plan`."""

from typing import Any

from every_plan import ranked

import pipedream as pd
from pipedream.planner import SearchSpace


def best_plans(space: SearchSpace, **how: Any) -> tuple[pd.Plan | None, pd.Plan | None]:
    """Returns the best plan that fits as a search counts it, and the best that fits; None where there is none.

    Args:
        space: whose plans.
        how: see `every_plan.ranked`.
    """
    plans = ranked(space, **how)
    fitting = (full for plan in plans if (full := space.with_bytes(plan)).first_stage_over_memory is None)
    return (space.with_bytes(plans[0]) if plans else None), next(fitting, None)
