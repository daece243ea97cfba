"""Further methods, one per file: variants of others, those not published in full, and those with own machinery.

The registry scans this folder; nothing else needs it.
"""

import pipedream.schedules  # noqa: F401  # first: the registry must not find a file here that is only half imported
