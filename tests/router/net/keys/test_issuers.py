"""Tokens of OpenID Connect issuers, with real keys and signatures."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from router.config.keys import ConfigError
from router.net.keys.issuers import FETCH_S, LEEWAY_S, REFRESH_S, Issuers, UnknownKeyError
from router.net.keys.key_ring import Issuer
from router.request.refusal import Reason, Refusal
from tests.stage.certificates import Authority, written
from tests.stage.keys import a_door, identity

ISSUER, AUDIENCE = "https://cluster.example", "kvroute"
ACCOUNT = "system:serviceaccount:chat:gateway"
NOW_S = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Signer:
    """An issuer's keys."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.served = ""
        self.add("one")

    def add(self, kid: str) -> None:
        self.keys[kid] = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def jwks(self) -> str:
        listed = [
            RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
            | {"kid": kid, "alg": "RS256", "use": "sig"}
            for kid, key in self.keys.items()
        ]
        return json.dumps({"keys": listed})

    def token(self, kid: str = "one", key: Any = None, **claims: Any) -> str:
        about = {"iss": ISSUER, "aud": AUDIENCE, "sub": ACCOUNT, "exp": NOW_S + 600} | claims
        about = {name: value for name, value in about.items() if value is not None}
        return jwt.encode(about, key or self.keys[kid], "RS256", headers={"kid": kid})


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


def from_file(folder: Path, signer: Signer, clock: Clock) -> Issuers:
    file = folder / "jwks.json"
    file.write_text(signer.jwks(), encoding="utf-8")
    issuer = Issuer(issuer=ISSUER, audience=AUDIENCE, jwks=file.as_uri())
    return Issuers((issuer,), clock)


def test_a_valid_token_is_its_account(tmp_path: Path, signer: Signer) -> None:
    issuers = from_file(tmp_path, signer, Clock())
    token = signer.token()
    assert issuers.verify(token) == (ISSUER, ACCOUNT)
    assert issuers.verify(token) == (ISSUER, ACCOUNT)  # remembered


def test_a_token_that_is_not_right_in_every_claim_is_nobodys(
    tmp_path: Path, signer: Signer
) -> None:
    issuers = from_file(tmp_path, signer, Clock())
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = signer.keys["one"].public_key()
    for token in (
        signer.token(aud="other"),
        signer.token(aud=None),
        signer.token(iss="https://other"),
        signer.token(iss=None),
        signer.token(sub=None),
        signer.token(exp=None),
        signer.token(exp=NOW_S - LEEWAY_S - 1),
        signer.token(nbf=NOW_S + LEEWAY_S + 1),
        signer.token(key=stranger),
        jwt.encode({"iss": ISSUER, "aud": AUDIENCE, "sub": "a", "exp": NOW_S + 9}, None, "none"),
        jwt.encode(  # with the public key's numbers as a shared secret
            {"iss": ISSUER, "aud": AUDIENCE, "sub": ACCOUNT, "exp": NOW_S + 9},
            str(public.public_numbers().n),
            "HS256",
            headers={"kid": "one"},
        ),
        signer.token()[:-4] + "AAAA",
        "a.b.c",
        "not a token",
        "",
        "x." * 100_000,
    ):
        assert issuers.verify(token) is None


def test_a_token_ends_with_its_time_even_if_it_was_verified_before(
    tmp_path: Path, signer: Signer
) -> None:
    clock = Clock()
    issuers = from_file(tmp_path, signer, clock)
    token = signer.token(exp=NOW_S + 60)
    assert issuers.verify(token) is not None
    clock.now_s += 60 + LEEWAY_S
    assert issuers.verify(token) is None


def test_elliptic_keys_count_too(tmp_path: Path, signer: Signer) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    listed = ECAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "ec", "use": "sig"}
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [listed]}), encoding="utf-8")
    issuers = Issuers((Issuer(issuer=ISSUER, audience=AUDIENCE, jwks=file.as_uri()),), Clock())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": ACCOUNT, "exp": NOW_S + 9}
    assert issuers.verify(jwt.encode(claims, key, "ES256", headers={"kid": "ec"})) is not None


async def test_keys_of_a_file_rotate(tmp_path: Path, signer: Signer) -> None:
    clock, rotating = Clock(), Signer()
    issuers = from_file(tmp_path, rotating, clock)
    old = rotating.token()
    assert issuers.verify(old) is not None
    rotating.keys.clear()
    rotating.add("two")
    (tmp_path / "jwks.json").write_text(rotating.jwks(), encoding="utf-8")
    with pytest.raises(UnknownKeyError):
        issuers.verify(rotating.token("two"))
    await issuers.fetch(ISSUER)
    assert issuers.verify(rotating.token("two")) is not None
    with pytest.raises(UnknownKeyError):
        issuers.verify(old)  # its key was taken back
    rotating.add("three")
    (tmp_path / "jwks.json").write_text(rotating.jwks(), encoding="utf-8")
    await issuers.fetch(ISSUER)  # too soon: callers can't have it fetched at will
    with pytest.raises(UnknownKeyError):
        issuers.verify(rotating.token("three"))
    clock.now_s += FETCH_S
    await issuers.fetch(ISSUER)
    assert issuers.verify(rotating.token("three", exp=NOW_S + 900)) is not None


@asynccontextmanager
async def https(folder: Path, signer: Signer, authority: Authority) -> AsyncIterator[Issuer]:
    settings = written(folder, authority.issue())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert settings.certificate_file is not None
    context.load_cert_chain(settings.certificate_file, settings.key_file)

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/moved":
            raise web.HTTPFound("/keys")
        return web.Response(text=signer.jwks())

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        (folder / "ca.crt").write_bytes(authority.pem)
        url = f"https://127.0.0.1:{runner.addresses[0][1]}/keys"
        ca = str(folder / "ca.crt")
        yield Issuer(issuer=ISSUER, audience=AUDIENCE, jwks=url, ca_file=ca)
    finally:
        await runner.cleanup()


async def test_keys_come_over_https_by_the_configured_ca_and_no_other(
    tmp_path: Path, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with https(tmp_path, signer, Authority()) as issuer:
        issuers = Issuers((issuer,), clock)
        await issuers.refresh()
        assert issuers.verify(signer.token()) is not None
        for failures, content in enumerate((Authority("other").pem, b""), 1):
            (tmp_path / "ca.crt").write_bytes(content)
            clock.now_s += REFRESH_S
            await issuers.refresh()
            assert issuers.fetches == {"ok": 1, "failed": failures}
        assert "no start line" in caplog.text, "an empty file does not stand for the system's CAs"
        assert issuers.verify(signer.token()) is not None  # by the keys of before


async def test_a_file_that_is_not_there_is_named_in_the_log(
    tmp_path: Path, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a pod without its service account's token."""
    async with https(tmp_path, signer, Authority()) as issuer:
        for field in ("ca_file", "token_file"):
            missing = str(tmp_path / f"no-{field}")
            odd = msgspec.structs.replace(issuer, **{field: missing})
            caplog.clear()
            await Issuers((odd,), Clock()).refresh()
            assert [f"{missing}: No such file or directory" in one for one in caplog.messages] == [
                True
            ]


async def test_a_redirect_is_not_followed(tmp_path: Path, signer: Signer) -> None:
    async with https(tmp_path, signer, Authority()) as issuer:
        moved = Issuer(
            issuer=ISSUER,
            audience=AUDIENCE,
            jwks=issuer.jwks.replace("/keys", "/moved"),
            ca_file=issuer.ca_file,
        )
        issuers = Issuers((moved,), Clock())
        await issuers.refresh()
        assert issuers.fetches == {"ok": 0, "failed": 1}


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    for text in ("", "[]", '{"keys": 5}', '{"keys": [5]}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="issuers"):
            Issuers((Issuer(issuer=ISSUER, audience=AUDIENCE, jwks=file.as_uri()),), Clock())


async def test_a_token_ends_with_its_key_even_if_the_next_key_has_its_id(tmp_path: Path) -> None:
    clock, rotating = Clock(), Signer()
    issuers = from_file(tmp_path, rotating, clock)
    old = rotating.token()
    assert issuers.verify(old) is not None
    rotating.add("one")
    (tmp_path / "jwks.json").write_text(rotating.jwks(), encoding="utf-8")
    clock.now_s += REFRESH_S - 1
    await issuers.fetch(ISSUER)
    assert issuers.verify(old) is None
    assert issuers.verify(rotating.token()) is not None


@pytest.mark.parametrize(
    "unsupported",
    [
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
        {"kty": "RSA", "alg": "RSA-OAEP", "n": "AQAB", "e": "AQAB"},
        {"kty": "EC", "crv": "P-999"},
        {"kty": "OKP", "crv": "X448", "x": "AA"},
        {"kty": "RSA", "n": "A", "e": "AQAB"},
        {},
    ],
)
async def test_a_key_of_a_kind_that_is_not_supported_hides_no_other(
    tmp_path: Path, unsupported: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvroute.keys")
    clock, rotating = Clock(), Signer()
    issuers = from_file(tmp_path, rotating, clock)
    rotating.add("two")
    listed = json.loads(rotating.jwks())
    listed["keys"].insert(1, unsupported | {"kid": "other"})
    (tmp_path / "jwks.json").write_text(json.dumps(listed), encoding="utf-8")
    clock.now_s += REFRESH_S
    await issuers.refresh()
    assert issuers.verify(rotating.token("two")) == (ISSUER, ACCOUNT)
    assert issuers.fetches == {"ok": 1, "failed": 0}
    assert "the key 'other' can't be used" in caplog.text


async def test_a_door_takes_an_accounts_token_and_fetches_its_unknown_key(tmp_path: Path) -> None:
    clock, signer = Clock(), Signer()
    file = tmp_path / "jwks.json"
    file.write_text(signer.jwks(), encoding="utf-8")
    account = {"issuer": ISSUER, "subject": ACCOUNT}
    door = a_door(
        tmp_path,
        identity("gateway", tokens=[], accounts=[account], rights=("route",)),
        issuers=[{"issuer": ISSUER, "audience": AUDIENCE, "jwks": file.as_uri()}],
        clock=clock,
    )
    usage = door.enter(signer.token(), lambda: (), is_unix=False)
    assert usage.identity.name == "gateway"
    with pytest.raises(Refusal) as refused:
        door.enter(signer.token(sub="other"), lambda: (), is_unix=False)
    assert refused.value.reason is Reason.UNAUTHENTICATED
    signer.add("two")
    file.write_text(signer.jwks(), encoding="utf-8")
    token = signer.token("two")
    with pytest.raises(UnknownKeyError) as unknown:
        door.enter(token, lambda: (), is_unix=False)
    usage = await door.enter_after(unknown.value, token, lambda: ())
    assert usage.identity.name == "gateway"
    nobody = signer.token(kid="one", key=signer.keys["one"])
    forged = jwt.encode(
        jwt.decode(nobody, options={"verify_signature": False}),
        signer.keys["one"],
        "RS256",
        headers={"kid": "never"},
    )
    with pytest.raises(UnknownKeyError) as unknown:
        door.enter(forged, lambda: (), is_unix=False)
    with pytest.raises(Refusal):
        await door.enter_after(unknown.value, forged, lambda: ())
