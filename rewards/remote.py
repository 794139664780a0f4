"""Ask an HTTP endpoint for the reward: reward.functions.remote=rewards/remote.py:remote."""

import json

import requests
from urllib3.util import Retry


def remote(
    text: str, answer: str, row: dict, url: str, timeout_s: float = 2.5, retries: int = 2, backoff_s: float = 0.5
) -> dict[str, float]:
    """What an HTTP endpoint replies to a POST of {"text", "answer", "row"}: {"reward": number}, or other parts.

    docs/rewards.md says when it retries. Raises ConnectionError after the last retry, and at once after another 4xx.
    """
    # What urllib3 tries again, with pauses of 0, 2, 4, ... times backoff_s.
    plan = Retry(
        retries,
        backoff_factor=backoff_s,
        status_forcelist={408, 429, *range(500, 600)},
        allowed_methods=None,  # POST too
        respect_retry_after_header=False,
        raise_on_status=False,
    )

    body = json.dumps({"text": text, "answer": answer, "row": row}, default=str)
    asked = url
    proxy = requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url))
    if proxy:
        asked += f" through the proxy {proxy} (NO_PROXY names exceptions)"
    headers = {"Content-Type": "application/json"}
    adapter = requests.adapters.HTTPAdapter(max_retries=plan)
    with requests.Session() as session:
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        try:
            response = session.post(url, body, timeout=timeout_s, headers=headers)
        except requests.RequestException as error:
            raise ConnectionError(f"{asked}: {error}, in at most {retries + 1} tries") from error

    if not response.ok:
        tries = len(response.raw.retries.history) + 1
        raise ConnectionError(f"{asked}: {response.status_code} {response.reason}, tried {tries} times")
    try:
        parts = response.json()
    except requests.JSONDecodeError:
        parts = response.text[:200]
    if not isinstance(parts, dict) or not parts:
        raise ValueError(f"{asked} replied {parts!r}; a reward is {{'reward': number}}")
    return parts


remote.waits = True  # for another machine: no end within reward.timeout_s is an error, not a slow answer
