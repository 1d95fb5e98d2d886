"""A typed client of the web API. It returns the values of ``models`` and of the lineage, and raises our errors.

with Client("http://127.0.0.1:8642", token="…") as client:
    for state in client.find("metrics.loss < 0.2 order by metrics.loss"):
        ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import httpx

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import RefKind, Value
from datastates.system.secret_file import is_sendable

from .answers import checked, disconnected, parsed
from .downloads import download
from .etags import etag_of_note, etag_of_ref
from .following import RefEvents
from .models import (
    Branches,
    CloneInfo,
    Comparison,
    Evicted,
    Forecast,
    GraphPage,
    Incomplete,
    Merges,
    Note,
    Overview,
    Page,
    Parallels,
    Processes,
    Ref,
    RefEvent,
    Report,
    ReportDetail,
    RepositoryInfo,
    RunInfo,
    Series,
    ServerInfo,
    State,
    StateDetail,
    Stats,
    Storage,
    Studies,
    StudyDetail,
    TensorInfo,
)

if TYPE_CHECKING:
    from datastates.algebra.diff import Diff
    from datastates.algebra.histogram import Histogram

__all__ = ["Client"]

T = TypeVar("T")
_PAGE = 500


class Client:
    """A client of a ``datastates serve`` server. Safe from any thread; a context manager.

    ``repository`` is one of ``repositories()``; it may be left out where the server has only one. Every method that takes a revision also
    takes a ``State``.

    :raises Disconnected: (every method) the server does not answer.
    :raises Unauthorized: (every method) the server requires a token, or one with a wider scope.
    """

    def __init__(self, url: str, *, token: str | None = None, repository: str | None = None, timeout_s: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"{url!r} is no address of a web server: it begins with http:// or https://")
        if token is not None and not is_sendable(token):
            raise InvalidInput("the token has characters that a header cannot carry: it is none that a server of datastates was given")
        self.url = url.rstrip("/").removesuffix("/api/v1")
        self._repository = repository
        headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    # --- the server ----------------------------------------------------------------------------------------------------------

    def repositories(self) -> tuple[RepositoryInfo, ...]:
        """The repositories that the server serves, and what the client may do in each."""
        return self._ask("GET", "/api/v1/repositories", Page[RepositoryInfo]).items

    @property
    def repository(self) -> str:
        """The name of the repository that all methods below address.

        :raises InvalidInput: there are several, and none was chosen.
        """
        if self._repository is None:
            names = [info.name for info in self.repositories()]
            if len(names) != 1:
                raise InvalidInput(f"{self.url} serves {', '.join(names) or 'nothing'}: choose one with Client(…, repository=…)")
            self._repository = names[0]
        return self._repository

    def is_healthy(self) -> bool:
        """Whether the server says that it is; False too when it does not answer."""
        try:
            return self._http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> str:
        """Numbers about the server, in the text format of Prometheus."""
        return self._send("GET", "/metrics").text

    # --- states --------------------------------------------------------------------------------------------------------------

    def state(self, rev: str | State) -> State:
        """The state that a revision names.

        :raises NotFound: it names none.
        :raises SyntaxProblem: the revision does not parse; the error has the column.
        """
        return self._get("/resolve", State, {"rev": values.revision(rev)})

    def show(self, rev: str | State) -> StateDetail:
        """Everything that is known of one state."""
        return self._get(f"/states/{self._uid(rev)}", StateDetail)

    def find(self, query: str = "", *, limit: int | None = None) -> Iterator[State]:
        """The states that a query finds, in its order, at most ``limit``. Reads page by page while it is iterated.

        :raises SyntaxProblem: the query does not parse; the error has the column.
        """
        return self._pages("/states", State, {"q": query}, limit)

    def log(self, rev: str | State = "main", *, limit: int | None = None) -> Iterator[State]:
        """A state and its first parents, newest first; read page by page."""
        return self._pages(f"/states/{self._uid(rev)}/log", State, {}, limit)

    def tensors(self, rev: str | State, *, norms: bool = False) -> tuple[TensorInfo, ...]:
        """The tensors of a state. With ``norms`` the server reads every byte once to compute them."""
        return self._get(f"/states/{self._uid(rev)}/tensors", Page[TensorInfo], {"norms": norms}).items

    def annotate(self, rev: str | State, /, **attributes: Value) -> State:
        """Set attributes of a state; None removes one."""
        return self._change("PATCH", f"/states/{self._uid(rev)}/attributes", State, {"attributes": attributes})

    def evict(self, rev: str | State, *, force: bool = False) -> Evicted:
        """Drop the bytes of a state on the server; the state stays in the lineage. With ``force`` also when a ref names it.

        :raises Conflict: a ref names it.
        """
        return self._ask("DELETE", self._at(f"/states/{self._uid(rev)}/payload"), Evicted, params={"force": force})

    def download(
        self, rev: str | State, path: str | os.PathLike[str], *, only: str | Sequence[str] | None = None, patience_s: float = 30.0
    ) -> Path:
        """Write the tensors of a state to a safetensors file. The file is either complete and verified, or not there.

        When an interrupted download is called again, it continues where it stopped.

        :param rev: the state.
        :param path: the file.
        :param only: names, or patterns of paths, of the tensors; None: all.
        :param patience_s: how long to wait for a server that went away.
        :raises Conflict: another download to the same path is under way.
        :raises Corrupt: the bytes that arrive differ from those that were sent, or the server found damage.
        """
        uid = self._uid(rev)
        params = {} if only is None else {"only": [only] if isinstance(only, str) else list(only)}
        return download(self._http, self._at(f"/states/{uid}/payload"), params, Path(path), patience_s=patience_s)

    # --- names ---------------------------------------------------------------------------------------------------------------

    def refs(self, kind: RefKind | str | None = None) -> tuple[Ref, ...]:
        """Every branch and tag, by name."""
        return self._get("/refs", Page[Ref], {} if kind is None else {"kind": str(kind)}).items

    def ref(self, name: str) -> Ref:
        """One branch or tag.

        :raises NotFound: there is no such name.
        """
        return self._get(f"/refs/{_path(name)}", Ref)

    def tag(self, name: str, rev: str | State, *, message: str | None = None) -> Ref:
        """Give a state a permanent name.

        :raises Conflict: the name is taken.
        """
        return self._make(RefKind.TAG, name, rev, message)

    def branch(self, name: str, rev: str | State) -> Ref:
        """Create a branch at a state.

        :raises Conflict: the name is taken.
        """
        return self._make(RefKind.BRANCH, name, rev, None)

    def move(self, name: str, rev: str | State, *, expected: Ref) -> Ref:
        """Point a ref at another state, provided that it still is as ``expected``.

        :raises Conflict: it moved meanwhile.
        """
        return self._change("PATCH", f"/refs/{_path(name)}", Ref, {"rev": values.revision(rev)}, {"If-Match": etag_of_ref(expected)})

    def delete_ref(self, ref: Ref) -> None:
        """Delete a name, provided that its ref still is as ``ref`` says; its reflog stays.

        :raises Conflict: it moved meanwhile.
        """
        self._send("DELETE", self._at(f"/refs/{_path(ref.name)}"), headers={"If-Match": etag_of_ref(ref)})

    def reflog(self, name: str, *, limit: int | None = None) -> Iterator[RefEvent]:
        """The moves of a ref, newest first, even of a deleted one; read page by page."""
        return self._pages(f"/reflog/{_path(name)}", RefEvent, {}, limit)

    # --- notes ---------------------------------------------------------------------------------------------------------------

    def notes(self, state: str | State | None = None, *, branch: str | None = None, limit: int | None = None) -> Iterator[Note]:
        """The notes on a state, on a branch, or on anything, newest first; read page by page."""
        named = {"state": None if state is None else self._uid(state), "branch": branch}
        return self._pages("/notes", Note, {key: value for key, value in named.items() if value is not None}, limit)

    def write_note(self, text: str, *, state: str | State | None = None, branch: str | None = None, author: str = "") -> Note:
        """Write a note on a state or a branch, in Markdown.

        :param text: at most 16,384 characters.
        :param state: a revision; the note stays with that state.
        :param branch: a branch; the note belongs to the branch's name.
        :param author: who wrote it.
        """
        body = {"text": text, "state": None if state is None else self._uid(state), "branch": branch, "author": author}
        return self._change("POST", "/notes", Note, body)

    def edit_note(self, note: Note, text: str) -> Note:
        """Change the text of a note, provided that the note has not changed since it was read.

        :raises Conflict: the note has changed.
        """
        return self._change("PATCH", f"/notes/{note.uid}", Note, {"text": text}, {"If-Match": etag_of_note(note)})

    def delete_note(self, note: Note) -> None:
        """Delete a note, provided that the note has not changed since it was read.

        :raises Conflict: the note has changed.
        """
        self._send("DELETE", self._at(f"/notes/{note.uid}"), headers={"If-Match": etag_of_note(note)})

    # --- the whole repository ------------------------------------------------------------------------------------------------

    def runs(self, *, limit: int | None = None) -> Iterator[RunInfo]:
        """The trainings, the last begun first; read page by page."""
        return self._pages("/runs", RunInfo, {}, limit)

    def run(self, uid: str) -> RunInfo:
        """One training, by its uid."""
        return self._get(f"/runs/{quote(uid, safe='')}", RunInfo)

    def incomplete(self, *, limit: int = 50) -> Incomplete:
        """The states of several ranks that still wait for parts of some of them, and at most ``limit`` of those that were given up."""
        return self._get("/incomplete", Incomplete, {"limit": limit})

    def branches(self, query: str = "", *, limit: int = 50, **asked: str) -> Branches:
        """A summary of each branch: one page of at most ``limit``.

        :param query: a condition, which must hold of a branch's newest state.
        :param asked: ``name``, ``metric``, ``direction``, ``sort``, ``group`` and ``after``, as in the API.
        :raises SyntaxProblem: the query does not parse; the error has the column.
        """
        return self._get("/branches", Branches, {"q": query, "limit": limit, **asked})

    def graph(self, *heads: str | State, first: int = 0, count: int = 200, around: str | State | None = None) -> GraphPage:
        """A window of the history of some revisions, or of every branch and tag, with the lanes of its lines.

        :param heads: the revisions; none: every branch and tag.
        :param first: the number of the first row, from 0.
        :param count: how many rows.
        :param around: a state on which the window is centred, instead of ``first``.
        """
        params: dict[str, Any] = {"head": values.revisions(heads), "first": first, "count": count}
        return self._get("/graph", GraphPage, params if around is None else params | {"around": self._uid(around)})

    def graph_overview(self, *heads: str | State, fold: bool = False) -> Overview:
        """An overview of a whole graph: where each branch stands in it.

        :param heads: the revisions; none: every branch and tag.
        :param fold: whether states that only follow one another share a row.
        """
        return self._get("/graph/overview", Overview, {"head": values.revisions(heads), "fold": fold})

    def series(
        self, heads: str | State | Sequence[str | State], keys: str | Sequence[str], *, points: int | None = None, **asked: str
    ) -> Series:
        """Curves of metrics along the first parents of some revisions.

        :param heads: the revisions.
        :param keys: the metrics.
        :param points: the number of points to which each curve is thinned.
        :param asked: ``shape``, ``x`` and ``group``, as in the API.
        """
        params: dict[str, Any] = {"head": values.revisions(heads), "key": keys, **asked}
        return self._get("/series", Series, params if points is None else params | {"points": points})

    def diff(
        self, old: str | State, new: str | State, *, only: str | Sequence[str] | None = None, tensors: bool = True, stat: bool = False
    ) -> Diff:
        """What changed between two states. If tensors could not be compared, ``lacking`` of the result says why.

        :param old: the state to compare from.
        :param new: the state to compare to.
        :param only: which tensors are compared.
        :param tensors: False compares everything else; the server then reads no payload.
        :param stat: compare tensors by their manifests alone, which reads no payload either.
        """
        from datastates.algebra.diff import Diff  # imports torch, which takes a while

        params: dict[str, Any] = {"old": values.revision(old), "new": values.revision(new), "tensors": tensors, "stat": stat}
        return self._get("/diff", Diff, params if only is None else params | {"only": only})

    def compare(self, revs: Sequence[str | State]) -> Comparison:
        """A comparison of at most 32 states: configuration, metrics, attributes, code, and where each can be restored."""
        return self._get("/comparison", Comparison, {"rev": values.revisions(revs)})

    def parallels(self, query: str = "", *, name: str = "", taken: str = "best", limit: int = 1000) -> Parallels:
        """Branches by their settings and metrics, one axis for each.

        :param query: a condition, as of ``find``; it must hold of a branch's newest state.
        :param name: a part of the names of the branches.
        :param taken: which value of a metric represents a branch: ``best`` or ``last``.
        :param limit: the most branches to return.
        :raises SyntaxProblem: the query does not parse; the error has the column.
        """
        return self._get("/parallels", Parallels, {"q": query, "name": name, "taken": taken, "limit": limit})

    def histogram(self, revs: str | State | Sequence[str | State], path: str, *, bins: int = 64, scale: str = "linear") -> Histogram:
        """How the values of one tensor are distributed in some states, over the same bins.

        :param revs: one state, or up to four of them.
        :param path: the tensor's path, as ``diff`` and ``tensors`` give it.
        :param bins: how many bins.
        :param scale: ``linear``, or ``log``: bins are then equally wide in the logarithms of magnitudes.
        :raises NotFound: a state has no such tensor; the error names similar ones.
        :raises InvalidInput: the server would have to read for longer than it is allowed to.
        """
        from datastates.algebra.histogram import Histogram  # imports torch, which takes a while

        return self._get("/histogram", Histogram, {"rev": values.revisions(revs), "path": path, "bins": bins, "scale": scale})

    # --- studies -------------------------------------------------------------------------------------------------------------

    def studies(self, *, limit: int = 100) -> Studies:
        """The studies, the last changed first."""
        return self._get("/studies", Studies, {"limit": limit})

    def study(self, name: str, *, limit: int = 500, **asked: str) -> StudyDetail:
        """One study, with its variants as a tree.

        :param name: the study.
        :param limit: the most variants to return.
        :param asked: ``metric`` and ``direction``, as in the API.
        :raises NotFound: there is no study of this name.
        """
        return self._get(f"/studies/{_path(name)}", StudyDetail, {"limit": limit, **asked})

    def merges(self, *, limit: int = 50, **asked: str) -> Merges:
        """Soups and other merged states, the newest first: one page of at most ``limit``. ``asked`` are ``metric`` and ``after``."""
        return self._get("/merges", Merges, {"limit": limit, **asked})

    def outlier_reports(self) -> tuple[Report, ...]:
        """The reports on outliers that are stored, the newest first."""
        return self._get("/outliers", Page[Report]).items

    def outlier_report(self, id: int, *, after: int = 0, limit: int = 60) -> ReportDetail:
        """One report, with its samples of the ranks after ``after``.

        :raises NotFound: there is no such report, or not any more.
        """
        return self._get(f"/outliers/{int(id)}", ReportDetail, {"after": after, "limit": limit})

    def picture(self, report: int, index: int) -> bytes:
        """The picture of a sample of a report: a PNG, JPEG, GIF or WebP.

        :raises NotFound: there is none.
        """
        return self._send("GET", self._at(f"/outliers/{int(report)}/pictures/{int(index)}")).content

    # --- what is going on ----------------------------------------------------------------------------------------------------

    def processes(self, *, limit: int = 100) -> Processes:
        """The processes that are tracking now, and what their trainings captured last."""
        return self._get("/processes", Processes, {"limit": limit})

    def storage(self) -> Storage:
        """What each tier holds, and how much room is left on the server."""
        return self._get("/storage", Storage)

    def forecast(self, *, limit: int = 50) -> Forecast:
        """What retention would drop on the server if it were applied now: at most the first ``limit`` states. Nothing is dropped."""
        return self._get("/retention", Forecast, {"limit": limit})

    def clones(self, *, limit: int | None = None) -> Iterator[CloneInfo]:
        """The states that came from other processes, the newest first; read page by page."""
        return self._pages("/clones", CloneInfo, {}, limit)

    def servers(self) -> tuple[ServerInfo, ...]:
        """Where the answering process serves the repository, and who is connected."""
        return self._get("/servers", Page[ServerInfo]).items

    def stats(self) -> Stats:
        """What the repository holds."""
        return self._get("/stats", Stats)

    def events(self, after: int | None = None, *, patience_s: float = 60.0) -> RefEvents:
        """Events of all refs as they happen: those after the id of an event (0: from the first on), or those from now on.

        The iterator connects at once. When the server goes away it reconnects, for as long as ``patience_s``; no event is missed or comes
        twice. Close it, or use ``with``.

        :raises Disconnected: the server stayed away for longer than that.
        """
        return RefEvents(self._http, self._at("/events"), after, patience_s=patience_s)

    # --- the end -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}{f' {self._repository}' if self._repository else ''}>"

    def _at(self, path: str) -> str:
        return f"/api/v1/repositories/{quote(self.repository, safe='')}{path}"

    def _uid(self, rev: str | State) -> str:
        return rev.uid if isinstance(rev, State) else self.state(rev).uid

    def _get(self, path: str, type_: type[T], params: Mapping[str, Any] | None = None) -> T:
        return self._ask("GET", self._at(path), type_, params=params)

    def _change(self, method: str, path: str, type_: type[T], body: object, headers: Mapping[str, str] | None = None) -> T:
        return self._ask(method, self._at(path), type_, json=body, headers=headers)

    def _make(self, kind: RefKind, name: str, rev: str | State, message: str | None) -> Ref:
        return self._change("PUT", f"/refs/{_path(name)}", Ref, {"kind": str(kind), "rev": values.revision(rev), "message": message})

    def _pages(self, path: str, type_: type[T], params: Mapping[str, Any], limit: int | None) -> Iterator[T]:
        after: dict[str, str] = {}
        while limit is None or limit > 0:
            size = _PAGE if limit is None else min(limit, _PAGE)
            page: Page[T] = self._get(path, Page[type_], {**params, **after, "limit": size})  # type: ignore[valid-type] # known only here
            yield from page.items
            if page.next is None:
                return
            limit = None if limit is None else limit - len(page.items)
            after = {"after": page.next}

    def _ask(self, method: str, path: str, type_: type[T], **options: Any) -> T:
        return parsed(self._send(method, path, **options), type_)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return checked(self._http.request(method, path, **options))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise disconnected(self.url, error) from error


def _path(name: str) -> str:
    """A name in an address. Parts that are only dots are escaped: as they stand they would lead to another name."""
    return "/".join("%2E" * len(part) if part in {".", ".."} else quote(part) for part in name.split("/"))
