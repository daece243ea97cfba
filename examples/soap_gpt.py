"""The small GPT of char_gpt.py with SOAP, for 2BW's stale gradients; needs ``pip install pytorch_optimizer``.

Run it: pipedream train examples/soap_gpt.py --workers 2 --schedule pipedream_2bw --compensation error_feedback
"""

from dataclasses import replace
from functools import partial

from char_gpt import recipe as char_gpt
from pytorch_optimizer import SOAP

import pipedream


def recipe(seed: int = 0) -> pipedream.Recipe:
    return replace(char_gpt(seed), optimizer=partial(SOAP, lr=3e-3))


if __name__ == "__main__":
    pipedream.run(recipe)
