"""Methods kept apart: not published in full, or the only user of some machinery.

The registry (`schedules.registry`) finds them by scanning this folder; nothing else in the package imports it, and
without it everything else works.
"""

import pipedream.schedules  # noqa: F401  # first: the registry must not find a file here that is only half imported
