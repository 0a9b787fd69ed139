"""A client for a running ComfyUI host: HTTP, the websocket, and what comes of a prompt."""

import asyncio
import concurrent.futures
import json
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

TEXT, PREVIEW_WITH_METADATA = 3, 4  # BinaryEventTypes in the host's protocol.py


class HostDied(RuntimeError):
    """The host process ended, or never answered. The message holds the end of its log."""


# -------------------------------------------------------------------------------------------------- what comes of a run


@dataclass(frozen=True)
class NodeError:
    """Where and why a prompt failed. `message` is what the person sees in the node's error window."""

    node_id: str
    node_type: str
    exception_type: str
    message: str
    traceback: str = ""

    def __str__(self):
        return f"{self.node_type} (node {self.node_id}): {self.exception_type}: {self.message}"


@dataclass
class Result:
    """What came of one prompt.

    status: "success", "error" (a node raised), "interrupted" (`/interrupt`) or "refused" (the host did not queue it)
    outputs: {node id: what the node put in its `ui`}, as in the host's history
    events: every websocket message of this prompt as (type, data), in order
    previews: (node id, encoded image), in order
    texts: (node id, line of text that it showed), in order
    """

    prompt_id: str = ""
    status: str = ""
    outputs: dict = field(default_factory=dict)
    events: list = field(default_factory=list)
    previews: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    error: NodeError | None = None
    seconds: float = 0.0

    @property
    def progress(self) -> list[tuple[str, float, float]]:
        """(node id, value, max) of every progress event."""
        return [(data["node"], data["value"], data["max"]) for kind, data in self.events if kind == "progress"]

    @property
    def cached(self) -> list[str]:
        """Ids of the nodes whose outputs the host took from its cache."""
        return [node for kind, data in self.events if kind == "execution_cached" for node in data["nodes"]]

    @property
    def ran(self) -> list[str]:
        """Ids of the nodes that the host executed, in order."""
        return [data["node"] for kind, data in self.events if kind == "executing" and data["node"] is not None]

    def expect_success(self) -> "Result":
        """This result, or an AssertionError that says which node failed and how."""
        if self.status != "success":
            raise AssertionError(f"The prompt ended as '{self.status}': {self.error or 'the host gave no reason'}")
        return self


class PromptRefused(ValueError):
    """The host's validation did not let the prompt into the queue (HTTP 400). `errors` holds one NodeError each."""

    def __init__(self, body: dict):
        self.errors = [
            NodeError(node_id, found.get("class_type", ""), error["type"], f"{error['message']}: {error['details']}")
            for node_id, found in (body.get("node_errors") or {}).items()
            for error in found["errors"]
        ]
        if not self.errors:  # something about the prompt as a whole, such as an unknown node type
            whole = body["error"]
            said = f"{whole['message']} {whole.get('details', '')}".strip()
            self.errors = [NodeError("", "", whole["type"], said)]
        super().__init__("; ".join(map(str, self.errors)))


# ----------------------------------------------------------------------------------------------------------- the client


class HostClient:
    """Talks to the host at `url`. `log_tail` gives the words for a HostDied."""

    def __init__(self, url: str, log_tail: Callable[[], str] = str):
        self.url, self.log_tail = url, log_tail
        # No proxy, whatever the environment says: the host is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # A loop in a thread of its own: the caller's thread may already run one (Playwright's does).
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="host client", daemon=True).start()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ----------------------------------------------------------------------------------------------------------- HTTP

    def request(self, path: str, body: bytes | None = None, *, timeout: float = 60, content_type: str = "") -> bytes:
        headers = {"Content-Type": content_type} if content_type else {}
        call = urllib.request.Request(self.url + path, data=body, headers=headers)
        with self._http.open(call, timeout=timeout) as answer:
            return answer.read()

    def get(self, path: str, *, timeout: float = 60):
        """The JSON at `path`. urllib.error.HTTPError for a status of 400 or more."""
        return json.loads(self.request(path, timeout=timeout))

    def post(self, path: str, data: dict, *, timeout: float = 60):
        """POST `data` as JSON; the JSON answer, or None where the host answers with nothing."""
        said = self.request(path, json.dumps(data).encode(), timeout=timeout, content_type="application/json")
        return json.loads(said) if said else None

    def object_info(self, node: str | None = None) -> dict:
        """The schemas of all nodes, or of one ({} when the host does not know it)."""
        found = self.get("/object_info" + (f"/{urllib.parse.quote(node)}" if node else ""))
        return found.get(node, {}) if node else found

    def view(self, filename: str, subfolder: str = "", type: str = "output") -> bytes:
        """A file that a node has saved, as the browser would fetch it."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": type})
        return self.request(f"/view?{query}")

    def pictures(self, result: Result, node: str | None = None) -> list:
        """The PIL images in a result's `ui`, of all nodes or of one, in order."""
        from PIL import Image

        nodes = [result.outputs.get(node, {})] if node is not None else list(result.outputs.values())
        files = [file for output in nodes for file in output.get("images", [])]
        return [Image.open(BytesIO(self.view(f["filename"], f.get("subfolder", ""), f["type"]))) for f in files]

    def upload(self, picture, name: str, subfolder: str = "") -> str:
        """Upload a PIL image, a path or encoded bytes into input/; returns what LoadImage calls it."""
        if hasattr(picture, "save"):
            buffer = BytesIO()
            picture.save(buffer, format="PNG")
            picture = buffer.getvalue()
        elif not isinstance(picture, bytes):
            picture = Path(picture).read_bytes()
        boundary = uuid.uuid4().hex
        parts = b""
        for key, value in (("subfolder", subfolder), ("type", "input"), ("overwrite", "true")):
            parts += f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        parts += f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'.encode()
        parts += b"Content-Type: application/octet-stream\r\n\r\n" + picture + f"\r\n--{boundary}--\r\n".encode()
        said = json.loads(
            self.request("/upload/image", parts, content_type=f"multipart/form-data; boundary={boundary}")
        )
        return "/".join(part for part in (said["subfolder"], said["name"]) if part)

    def interrupt(self):
        """What the Cancel button does."""
        self.request("/interrupt", b"{}", content_type="application/json")

    # ------------------------------------------------------------------------------------------------------ the queue

    def queue(self, prompt: dict, client_id: str = "", extra_data: dict | None = None) -> str:
        """Queue a prompt in API format and return its id. PromptRefused where the host's validation says no."""
        body = {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex, "extra_data": extra_data or {}}
        try:
            return self.post("/prompt", body)["prompt_id"]
        except urllib.error.HTTPError as refused:
            if refused.code != 400:
                raise
            raise PromptRefused(json.loads(refused.read())) from None

    def run(
        self,
        prompt: dict,
        timeout: float = 300,
        *,
        on_event: Callable[[str, dict], None] | None = None,
        extra_data: dict | None = None,
    ) -> Result:
        """Queue a prompt in API format, follow it over the websocket to its end, and return what came of it.

        on_event(type, data) is called, in another thread, for each websocket message of this prompt; it may call
        `interrupt`. TimeoutError (after an interrupt) past `timeout` s; HostDied when the host dies.
        """
        began = time.perf_counter()
        job = asyncio.run_coroutine_threadsafe(self._follow(prompt, on_event, extra_data or {}), self._loop)
        try:
            result = job.result(timeout)
        except concurrent.futures.TimeoutError:  # another class than TimeoutError up to Python 3.10
            self.interrupt()
            raise TimeoutError(f"The prompt was not done after {timeout:.0f} s.\n{self.log_tail()}") from None
        finally:
            job.cancel()  # does nothing once it is done; ends the follower on Ctrl-C
        result.seconds = time.perf_counter() - began
        return result

    async def _follow(self, prompt: dict, on_event, extra_data: dict) -> Result:
        import aiohttp  # one of the host's own requirements

        result, client = Result(), uuid.uuid4().hex
        broke = "it closed the connection"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket,
            ):
                # Previews come with the node's id only to a client that says first that it can read them.
                await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.BINARY:
                        shown = len(result.texts)
                        _read_binary(result, message.data)
                        if on_event is not None and len(result.texts) > shown:
                            node, text = result.texts[-1]
                            await asyncio.to_thread(on_event, "text", {"node": node, "text": text})
                        continue
                    if message.type != aiohttp.WSMsgType.TEXT:
                        break
                    kind, data = (said := json.loads(message.data))["type"], said["data"]
                    if kind == "feature_flags":  # the greeting is answered: nothing can be missed from here on
                        result.prompt_id = await asyncio.to_thread(self.queue, prompt, client, extra_data)
                    if not result.prompt_id or data.get("prompt_id") != result.prompt_id:
                        continue
                    result.events.append((kind, data))
                    if on_event is not None:
                        await asyncio.to_thread(on_event, kind, data)
                    if kind == "executing" and data["node"] is None:  # sent once the history is written
                        history = await asyncio.to_thread(self.get, f"/history/{result.prompt_id}")
                        _conclude(result, history[result.prompt_id])
                        return result
        except PromptRefused as refused:
            result.status, result.error = "refused", refused.errors[0]
            return result
        except (aiohttp.ClientError, ConnectionError, urllib.error.URLError) as error:
            broke = str(error)
        raise HostDied(f"The host was lost in the middle of a prompt: {broke}.\n{self.log_tail()}")


def _read_binary(result: Result, data: bytes):
    """Layout: event type, length of what follows (both big-endian uint32), then metadata as JSON and an encoded image,
    or a node's id and a text.
    """
    kind, length = struct.unpack_from(">II", data)
    if kind == TEXT and result.prompt_id:
        result.texts.append((data[8 : 8 + length].decode(), data[8 + length :].decode()))
    if kind == PREVIEW_WITH_METADATA:
        metadata = json.loads(data[8 : 8 + length])
        if metadata.get("prompt_id") == result.prompt_id:
            result.previews.append((metadata["node_id"], data[8 + length :]))


def _conclude(result: Result, history: dict):
    result.outputs = history["outputs"]
    for kind, data in history["status"]["messages"]:
        if kind == "execution_success":
            result.status = "success"
        elif kind == "execution_interrupted":
            result.status = "interrupted"
            result.error = NodeError(data["node_id"], data["node_type"], kind, "interrupted")
        elif kind == "execution_error":
            result.status = "error"
            result.error = NodeError(
                data["node_id"],
                data["node_type"],
                data["exception_type"],
                data["exception_message"].strip(),  # the host appends a line for its tips, most often an empty one
                "".join(data["traceback"]),
            )
