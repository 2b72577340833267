"""The control plane's own routes: JSON in, JSON out, all below `PREFIX`, none without the admin token."""

import json
from http import HTTPStatus
from typing import Any

from beam_rl.rollout.manifest import Fingerprint
from beam_rl.rollout.swap_control import Busy, Control, Failed, Lease
from beam_rl.rollout.swap_stage import Wanted
from beam_rl.rollout.swap_store import Unfit

PREFIX = "/beam/admin/"

Answer = tuple[HTTPStatus, Any]


async def answer(control: Control, method: str, path: str, body: bytes) -> Answer:
    """Do what a request with the admin token asks for.

    Refused weights give 422, another client's lease 409, an exchange that did not happen 500 (the server serves on);
    all with "error".
    """
    action = path.removeprefix(PREFIX)
    try:
        if (method, action) == ("GET", "status"):
            return HTTPStatus.OK, control.status()
        if method != "POST" or action not in ("prepare", "commit", "rollback", "release"):
            return HTTPStatus.NOT_FOUND, {"error": f"no such operation: {method} {path}"}
        request = json.loads(body or b"{}")
        lease = Lease(request["lease"], request["holder"], float(request["lease_seconds"]))
        return HTTPStatus.OK, await _operate(control, action, lease, request)
    except (ValueError, KeyError, TypeError) as error:
        return HTTPStatus.BAD_REQUEST, {"error": f"the request cannot be understood: {error!r}"}
    except Unfit as error:
        return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
    except Busy as error:
        return HTTPStatus.CONFLICT, {"error": str(error)}
    except Failed as error:
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
    except Exception as error:  # the engine died: vLLM ends the server
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}


async def _operate(control: Control, action: str, lease: Lease, request: dict[str, Any]) -> dict[str, Any]:
    if action == "prepare":
        return await control.prepare(lease, _wanted(request), bool(request.get("dry_run")))
    if action == "commit":
        return await control.commit(lease, request.get("drain_seconds"), request.get("tolerance"))
    if action == "rollback":
        return await control.rollback(lease, request.get("undo"))
    return await control.release(lease)


def _wanted(request: dict[str, Any]) -> Wanted | None:
    """What is to be staged; None for the full weights below an adapter."""
    if request["weights"] is None:
        return None
    fingerprint = request.get("fingerprint")
    if request["kind"] not in ("checkpoint", "adapter"):
        raise ValueError(f"kind {request['kind']!r}")
    return Wanted(
        weights=str(request["weights"]),
        kind=request["kind"],
        label=request.get("label"),
        fingerprint=None if fingerprint is None else Fingerprint(**fingerprint),
        allow_older=bool(request.get("allow_older")),
    )
