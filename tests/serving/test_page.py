"""The page in a real browser: it shows the running server, and a click shows a picture."""

import re
import shutil

import httpx
import numpy as np
import pytest
from captures import KEYS, HandCapture
from waiting import wait_until_at_rest

from layertap.files.read import read_file

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@needs_browser
def test_a_person_sees_the_server_and_clicks_through_it(browser, server, http):
    body = {
        "model": "tiny",
        "prompt": "a picture of this",
        "max_tokens": 9,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    for number in range(30):
        left = HandCapture(server.state.front, f"left-{number}")
        server.state.book.follow([left.capture])
        left.fail("somebody left")
        wait_until_at_rest(server)
    name = http.post("/v1/completions", json=body).json()["id"]
    http.get(f"/v1/hidden_states/{name}", params={"wait": 30})
    failing = HandCapture(server.state.front, "shown-as-failed")
    server.state.book.follow([failing.capture])
    failing.fail("the <b>reason</b> for a person")
    wait_until_at_rest(server)
    problems = []
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    page.wait_for_selector(f"td:text-is('{name}')")
    assert page.inner_text("#model") == "tiny"
    assert "4 blocks of 64" in page.inner_text("#facts")
    assert page.locator("#stack i.on").count() == 3
    assert re.search(r"Layers 1, 2, 4 of 0 to 4", page.inner_text("#layers"))
    assert "the <b>reason</b> for a person" in page.inner_text("#failures")
    assert page.inner_text("#failures").count("somebody left") == 1
    assert "30 times, latest left-29" in page.inner_text("#failures")
    assert [page.evaluate(f"spans({layers})") for layers in ("[]", "[3]", "[1, 2, 4]", "[0, 1, 2, 7, 6, 8, 9, 10]")] == [
        "", "3", "1, 2, 4", "0 to 2, 7, 6, 8 to 10",
    ]  # fmt: skip
    row = page.locator("tr", has=page.locator("td:text-is('shown-as-failed')"))
    assert "the <b>reason</b> for a person" in row.inner_text()
    row = page.locator("tr", has=page.locator(f"td:text-is('{name}')"))
    row.get_by_role("button", name="Picture").click()
    page.wait_for_selector(".picture.open canvas")
    drawn = page.evaluate(
        "() => { const c = document.querySelector('.picture.open canvas'); "
        "return [c.height, c.width, new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size] }"
    )
    assert drawn[0] == 3
    assert drawn[1] == len(read_file(server.state.book.get(name).path).token_ids)
    assert drawn[2] > 10
    page.wait_for_timeout(2500)  # the picture is still open after the next look at the server
    assert page.locator(".picture.open canvas").count() == 1
    page.locator("tr", has=page.locator(f"td:text-is('{name}')")).get_by_role("button", name="Picture").click()
    page.wait_for_selector(".picture.open", state="detached")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert problems == []
    page.close()


@needs_browser
def test_a_browser_comes_in_with_the_key_as_its_password(browser, keyed):
    context = browser.new_context(http_credentials={"username": "me", "password": KEYS[0]})
    page = context.new_page()
    page.goto(keyed.url)
    page.wait_for_selector(".dot.up")
    assert page.inner_text("#model") == "tiny"
    context.close()


def test_pictures_are_the_lengths_of_the_rows(http, llm):
    hand = HandCapture(llm.front, "pictured", num_tokens=500)
    hand.publish()
    picture = http.get("/page/picture/pictured").json()
    assert (picture["layers"], picture["first"], picture["last"], picture["sampled"]) == ([1, 2], 0, 499, True)
    rows = (
        read_file(hand.path).rows.view("<f4").astype(np.float64)[[0, 499]]
    )  # random bytes: also not a number, infinite
    rows = np.where(np.isnan(rows), 0.0, rows.clip(-3e38, 3e38))
    found = np.array(picture["norms"])[:, [0, -1]].T
    assert np.allclose(found, np.sqrt((rows**2).sum(-1)), rtol=1e-4)


def test_the_page_is_self_contained_and_locked_down(http):
    answer = http.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", answer.text)
    assert "http://" not in answer.text
    assert "https://" not in answer.text


def test_a_key_sees_its_own_captures_only(keyed):
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    body = {"prompt": "private", "max_tokens": 1}
    name = httpx.post(f"{keyed.url}/v1/completions", json=body, headers=mine, timeout=60).json()["id"]
    httpx.get(f"{keyed.url}/v1/hidden_states/{name}", params={"wait": 30}, headers=mine, timeout=60)
    for headers, seen in ((mine, True), (other, False)):
        status = httpx.get(f"{keyed.url}/page/status", headers=headers).json()
        assert (name in [entry["id"] for entry in status["latest"]]) is seen
        picture = httpx.get(f"{keyed.url}/page/picture/{name}", headers=headers)
        assert picture.status_code == (200 if seen else 404)
