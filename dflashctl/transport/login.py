"""Logging in: which keys are offered (files the user names, the agent's, the default ones) and what refusals mean."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dflashctl.errors import UnreachableError
from dflashctl.transport.base import within
from dflashctl.transport.hostkeys import fingerprint
from dflashctl.transport.sshconfig import Endpoint

if TYPE_CHECKING:
    from paramiko import AgentKey, PKey
    from paramiko import Transport as Connection

AGENT_PATIENCE = 3.0
"""Seconds for the agent to list its keys."""

DEFAULT_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Identity:
    """A key to offer, and how to name it to a person."""

    key: PKey
    words: str


@dataclass
class Identities:
    """What can be offered, and what can't be and why."""

    offers: list[Identity] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    locked: Path | None = None  # an encrypted key file that the agent doesn't hold
    agent_answers: bool = False

    def add(self, key: PKey, origin: str) -> None:
        blob = key.asbytes()
        if all(offer.key.asbytes() != blob for offer in self.offers):
            self.offers.append(Identity(key, f"{origin} ({fingerprint(blob)})"))


def gather(endpoint: Endpoint) -> Identities:
    """Named files first, then the agent's keys (unless IdentitiesOnly), then the default files if none is
    named.

    Raises UnreachableError when the key file that hosts.toml names does not exist or is no private key.
    """
    from paramiko import Agent, SSHException

    found = Identities()
    agent_keys: list[AgentKey] = []
    try:
        agent_keys = within(AGENT_PATIENCE, lambda: list(Agent().get_keys()))
    except SSHException:
        pass  # the socket leads nowhere
    except TimeoutError:  # such as one that was forwarded over a connection that died since
        found.unusable.append("the agent (it does not answer)")
    found.agent_answers = bool(agent_keys)
    files = endpoint.identities or tuple(Path.home() / ".ssh" / name for name in DEFAULT_FILES)
    if endpoint.identities:
        _add_files(found, files, agent_keys, endpoint)
    if not endpoint.identities_only:
        for key in agent_keys:
            found.add(key, f"agent key {getattr(key, 'comment', '') or key.get_name()}")
    if not endpoint.identities:
        _add_files(found, files, agent_keys, endpoint)
    return found


def _add_files(
    found: Identities, files: tuple[Path, ...], agent_keys: list[AgentKey], endpoint: Endpoint
) -> None:
    for file in files:
        required = endpoint.required and file == endpoint.identities[0]
        in_agent = _held_by_agent(file, agent_keys)
        if in_agent is not None:
            found.add(in_agent, f"{file} (from the agent)")
        elif file.is_file():
            _add_file(found, file, required)
        elif required:
            raise UnreachableError(
                f"the key file of {endpoint.name} does not exist: {file}",
                hint="correct identity_file of the host in hosts.toml, or leave it out to use ~/.ssh and the agent",
            )


def _add_file(found: Identities, file: Path, required: bool) -> None:
    import paramiko

    try:
        for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
            try:
                key = kind.from_private_key_file(str(file))
            except paramiko.PasswordRequiredException:
                found.unusable.append(f"{file} (encrypted, not in the agent)")
                found.locked = found.locked or file
                return
            except (paramiko.SSHException, ValueError):
                continue
            certificate = file.with_name(file.name + "-cert.pub")
            if certificate.is_file():
                key.load_certificate(str(certificate))
            found.add(key, str(file))
            return
    except OSError as error:
        if required:
            raise UnreachableError(
                f"the key file can't be read: {error.strerror}",
                where=str(file),
                hint="check its owner and mode (0600)",
            ) from error
        found.unusable.append(f"{file} ({error.strerror})")
        return
    if required:
        raise UnreachableError(
            "the key file holds no private key that can be used",
            where=str(file),
            hint="identity_file is the private half, without .pub; DSA keys are no longer supported",
        )
    found.unusable.append(f"{file} (not a usable private key)")


def _held_by_agent(file: Path, agent_keys: list[AgentKey]) -> AgentKey | None:
    """The agent's key whose public half lies beside `file`, or is `file`: the way to an encrypted key, and to one of many."""
    for public in (file.with_name(file.name + ".pub"), file):
        try:
            blob = base64.b64decode(public.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if found := next((key for key in agent_keys if key.asbytes() == blob), None):
            return found
    return None


def log_in(endpoint: Endpoint, connection: Connection, limit: float) -> None:
    """Offer one key after the other, each answered within `limit` seconds. Raises UnreachableError."""
    import paramiko

    connection.auth_timeout = limit
    identities = gather(endpoint)
    refused: list[str] = []
    allowed: list[str] = []
    for identity in identities.offers:
        try:
            further = connection.auth_publickey(endpoint.user, identity.key)
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
            break
        except (paramiko.SSHException, EOFError, OSError) as error:
            refused.append(identity.words)
            refusal = isinstance(error, paramiko.AuthenticationException) and not _unanswered(error)
            if connection.is_active() and refusal:
                continue
            raise _login_broke(endpoint, refused, error, limit) from error
        if not further:
            return
        refused.append(f"{identity.words}, accepted, but {' and '.join(further)} asked for as well")
        allowed = further
    raise _login_refused(endpoint, identities, refused, allowed)


def _unanswered(error: Exception) -> bool:
    """Whether paramiko gave the waiting up. It raises the same class for that as for a refusal, and leaves the line open."""
    return "timeout" in str(error).lower()


def _login_broke(endpoint: Endpoint, tried: list[str], error: Exception, limit: float) -> UnreachableError:
    if _unanswered(error):
        return UnreachableError(
            f"the login at {endpoint.login} got no answer within {round(limit, 1):g} s",
            where=f"tried {tried[-1]}",
            hint="the network or the host hangs, or the agent waits for you to touch or confirm a key; "
            "raise connect_timeout, or try ssh by hand",
        )
    return UnreachableError(
        f"{endpoint.login} broke the login off after {len(tried)} key{'s' if len(tried) != 1 else ''}",
        where="tried " + ", ".join(tried),
        hint="name the right key: identity_file in hosts.toml, or IdentityFile and IdentitiesOnly in ~/.ssh/config",
    )


def _login_refused(
    endpoint: Endpoint, identities: Identities, refused: list[str], allowed: list[str]
) -> UnreachableError:
    tried = [*refused, *identities.unusable]
    if allowed and "publickey" not in allowed:
        return UnreachableError(
            f"{endpoint.login} takes no keys, only {', '.join(allowed)}",
            where="tried " + ", ".join(tried) if tried else "",
            hint="allow PubkeyAuthentication in its sshd_config; dflashctl types no passwords",
        )
    if identities.locked:
        hint = f"unlock it for the agent: ssh-add {identities.locked}"
        if not identities.agent_answers:
            hint += "  (no agent with keys answers now: eval $(ssh-agent) first)"
    else:
        put = (
            "put your key" if tried else "make a key where you have none (ssh-keygen -t ed25519), and put it"
        )
        hint = f"{put} there: ssh-copy-id {'-p ' + str(endpoint.port) + ' ' if endpoint.port != 22 else ''}"
        hint += f"{endpoint.user}@{endpoint.address}; or set identity_file or user of the host in hosts.toml"
    agent = "" if identities.agent_answers else "; the agent holds none"
    return UnreachableError(
        f"login refused by {endpoint.login}" + ("" if tried else ": there is no key to offer"),
        where=("tried " + ", ".join(tried) if tried else "looked in ~/.ssh") + agent,
        hint=hint,
    )
