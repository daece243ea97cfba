"""Methods kept apart: not published in full, or the only user of some machinery.

The registry scans this folder; nothing else needs it.
"""

import pipedream.schedules  # noqa: F401  # first: the registry must not find a file here that is only half imported
