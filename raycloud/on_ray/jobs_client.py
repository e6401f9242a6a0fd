"""Ray's own client of the Jobs API, held to the one address that was checked.

Ray's would let `RAY_ADDRESS` take the place of the address that was given, follow a redirect, and
ask a proxy or `~/.netrc` on the way: each could carry the token elsewhere.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import ray
import requests
from ray._private.authentication.http_token_authentication import format_authentication_http_error
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

    from raycloud.on_ray.endpoint import Endpoint

_ASK_S = 30.0
_SEND_S = 600.0  # a package over a thin link

_REFUSED = (401, 403)


class JobsClient(JobSubmissionClient):
    """A `JobSubmissionClient` for one endpoint."""

    def __init__(self, where: Endpoint) -> None:
        """Ask for the version there.

        Raises:
            ConnectionError: Nobody answers.
            AuthenticationError: The token is refused, or one is wanted.
        """
        self._client_ray_version = ray.__version__
        self._where = where
        self._session = requests.Session()
        # A proxy cannot reach this machine, and nothing but the endpoint's own token is shown.
        self._session.trust_env = not where.loopback
        # Not JobSubmissionClient's: it takes the address from the environment.
        SubmissionClient.__init__(self, address=where.url, headers=where.headers)
        # Ray leaves None, which aiohttp no longer wants; it means the same.
        self._ssl_context = ssl.create_default_context()
        self._check_connection_and_version()

    def get_address(self) -> str:
        """Where it speaks to."""
        return self._where.url

    def _do_request(
        self,
        method: str,
        endpoint: str,
        *,
        data: bytes | None = None,
        json_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        waits_s = _SEND_S if method == "PUT" else _ASK_S
        response = self._session.request(
            method,
            self._where.url + endpoint,
            data=data,
            json=json_data,
            auth=self._shown,
            allow_redirects=False,
            # A log that is followed may be silent for as long as it likes.
            timeout=(_ASK_S, None if kwargs.get("stream") else waits_s),
            **kwargs,
        )
        if response.status_code in _REFUSED:  # else the text of a log that is followed is not read
            problem = format_authentication_http_error(response.status_code, response.text)
            raise AuthenticationError(problem or response.text)
        return response

    def _shown(self, request: PreparedRequest) -> PreparedRequest:
        """Requests reads `~/.netrc` unless something like this is given."""
        request.headers.update(self._where.headers)
        return request
