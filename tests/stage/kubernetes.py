"""Kubernetes' API as far as discovery speaks to it: lists in pages, watches, over real HTTP.

Source: Kubernetes API concepts (lists with `limit` and `continue`, watches with resourceVersion,
410 Gone), and answers of a real API server.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Object = dict[str, Any]
EXPIRED = "too old resource version"


def pod(
    name: str,
    *,
    ip: str = "127.0.0.1",
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    uid: str = "",
    node: str = "node-a",
    phase: str = "Running",
    leaving: bool = False,
) -> Object:
    """A pod, as the API shows it."""
    metadata: Object = {
        "name": name,
        "namespace": "inference",
        "uid": uid or f"uid-{name}",
        "labels": labels or {"app": "vllm"},
        "annotations": {"cni.example/ips": "[]", **(annotations or {})},
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    }
    if leaving:
        metadata["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


class KubernetesServer:
    """One namespace. What it answers can be changed while it serves."""

    def __init__(self) -> None:
        self.pods: dict[str, Object] = {}
        self.nodes: dict[str, dict[str, str]] = {}
        self.pool: Object | None = None
        self.forbidden: set[str] = set()
        """Requests that are refused with 403: `list pods` and so on."""
        self.requests: Counter[str] = Counter()
        self.selectors: list[str] = []
        self.tokens: list[str] = []
        """Authorization headers, in the order of requests."""
        self.may_list = asyncio.Event()
        """Cleared: lists wait."""
        self.may_list.set()
        self.page_items = 1000
        self.url = ""
        self._version = 100
        self._oldest = 0
        """Versions below are forgotten."""
        self._log: list[tuple[int, str, Object]] = []
        self._watches: dict[asyncio.Queue[bytes | None], web.Request] = {}
        self._snapshots: dict[str, list[Object]] = {}

    # --- changes of the cluster -------------------------------------------------------------------

    def put(self, document: Object) -> None:
        """Adds a pod, or changes it."""
        name = document["metadata"]["name"]
        self._happened("MODIFIED" if name in self.pods else "ADDED", document)
        self.pods[name] = document

    def delete(self, name: str) -> None:
        self._happened("DELETED", self.pods.pop(name))

    def silently(self, *, delete: str) -> None:
        """A change of which no watch hears: as while a watch was away and history was dropped."""
        del self.pods[delete]
        self._version += 1

    def compact(self) -> None:
        """Forgets all history: older versions are Gone."""
        self._oldest = self._version + 1
        self._version += 1
        self._log.clear()
        self._snapshots.clear()

    # --- faults of its watches --------------------------------------------------------------------

    @property
    def watches(self) -> int:
        return len(self._watches)

    def send(self, event: str, document: Object) -> None:
        """An event on every watch."""
        self._send(_line(event, document))

    def gone(self) -> None:
        """Ends every watch with 410, as a server does that has dropped its history."""
        self.compact()
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": EXPIRED}
        self.send("ERROR", status)
        self._send(None)

    def cut(self) -> None:
        """Breaks every watch in the middle of a line."""
        self._send(b'{"type":"MODIFIED","object":{"metadata":{"na')
        self._send(None)

    def end(self) -> None:
        """Ends every watch, as a server does after timeoutSeconds."""
        self._send(None)

    def _send(self, part: bytes | None) -> None:
        for watch in self._watches:
            watch.put_nowait(part)

    def _happened(self, event: str, document: Object) -> None:
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        document = json.loads(json.dumps(document))
        self._log.append((self._version, event, document))
        for watch, request in self._watches.items():
            if _matches(document, request):
                watch.put_nowait(_line(event, document))

    # --- requests ---------------------------------------------------------------------------------

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "1"
        what = "watch pods" if watch else "list pods"
        if refused := self._refused(request, what):
            return refused
        self.selectors.append(request.query.get("labelSelector", ""))
        return await (self._watch(request) if watch else self._list(request))

    async def _list(self, request: web.Request) -> web.Response:
        await self.may_list.wait()
        token = request.query.get("continue", "")
        limit = min(int(request.query.get("limit", 500)), self.page_items)
        if token:
            version, _, start_text = token.partition(":")
            items, start = self._snapshots.get(version), int(start_text)
            if items is None:
                return _status(410, "Expired", "The provided continue parameter is too old")
        else:
            version, start = str(self._version), 0
            items = self._snapshots[version] = [
                one for one in self.pods.values() if _matches(one, request)
            ]
        metadata: Object = {"resourceVersion": version}
        if start + limit < len(items):
            metadata["continue"] = f"{version}:{start + limit}"
        page = {"kind": "PodList", "metadata": metadata, "items": items[start : start + limit]}
        return web.json_response(page)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self._oldest:
            return _status(410, "Expired", EXPIRED)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        for at, event, document in self._log:
            if at > version and _matches(document, request):
                parts.put_nowait(_line(event, document))
        self._watches[parts] = request
        try:
            await response.prepare(request)
            while (part := await parts.get()) is not None:
                await response.write(part)
        except ConnectionResetError:
            pass
        finally:
            del self._watches[parts]
        return response

    async def _node(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request, "get nodes"):
            return refused
        name = request.match_info["name"]
        return web.json_response({"metadata": {"name": name, "labels": self.nodes[name]}})

    async def _get_pool(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request, "get inferencepools"):
            return refused
        if self.pool is None:
            return _status(404, "NotFound", "inferencepools not found")
        return web.json_response(self.pool)

    def _refused(self, request: web.Request, what: str) -> web.Response | None:
        self.requests[what] += 1
        self.tokens.append(request.headers.get("Authorization", ""))
        if what not in self.forbidden:
            return None
        verb, resource = what.split()
        message = (
            f'{resource} is forbidden: User "system:serviceaccount:inference:kvroute" cannot'
            f' {verb} resource "{resource}" in API group "" in the namespace "inference"'
        )
        return _status(403, "Forbidden", message)


def _line(event: str, document: Object) -> bytes:
    return json.dumps({"type": event, "object": document}).encode() + b"\n"


def _matches(document: Object, request: web.Request) -> bool:
    wanted = request.query.get("labelSelector", "")
    pairs = (part.split("=") for part in wanted.split(",") if part)
    return all(document["metadata"]["labels"].get(key) == value for key, value in pairs)


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


@asynccontextmanager
async def kubernetes_server() -> AsyncIterator[KubernetesServer]:
    """Serves on a free port of loopback."""
    server = KubernetesServer()
    app = web.Application()
    pool = "/apis/inference.networking.k8s.io/v1/namespaces/inference/inferencepools/{name}"
    app.add_routes(
        [
            web.get("/api/v1/namespaces/inference/pods", server._pods),
            web.get("/api/v1/nodes/{name}", server._node),
            web.get(pool, server._get_pool),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.end()
        await runner.cleanup()
