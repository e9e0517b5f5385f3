"""The page /dashboard in a headless browser, on a server with the fake engine."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from batch_inputs import completion_line, submit, wait_for
from fake_engine import DIE, SILENT

import omniserve
from omniserve.server.dashboard import history

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: install the extra dev")
expect = sync_api.expect

ROOT = Path(__file__).parents[2]
TIMEOUT_MS = 30_000
ATTACK = "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>"


def live(page: sync_api.Page) -> sync_api.Page:
    """Return the page once it shows numbers."""
    expect(page.locator("#status")).to_have_text("Live", timeout=TIMEOUT_MS)
    expect(page.locator("figure canvas")).to_have_count(9, timeout=TIMEOUT_MS)
    return page


@pytest.fixture(scope="module", autouse=True)
def frequent_samples() -> Iterator[None]:
    """Samples, and looks of pages at them, four times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "INTERVAL_S", 0.25)
        yield


@pytest.fixture(scope="module")
def shown(server, open_module_page) -> sync_api.Page:
    """A page for tests that leave it as it was, or set what they depend on."""
    return live(open_module_page(server.url))


@pytest.fixture(scope="module")
def troubled(server, open_module_page) -> sync_api.Page:
    """A page for tests in which something goes wrong in it."""
    return live(open_module_page(server.url, problems_expected=True))


def hasten(page: sync_api.Page) -> None:
    """Have the page look ten times a second at what it looks at now and then: it does when it is shown again."""
    page.evaluate("() => { setInterval(() => document.dispatchEvent(new Event('visibilitychange')), 100) }")


def tile(page: sync_api.Page, label: str) -> sync_api.Locator:
    return page.locator(".tile", has_text=label).locator(".big")


def chart(page: sync_api.Page, title: str) -> sync_api.Locator:
    return page.locator("figure", has_text=title)


def test_page_loads_alone_and_says_what_to_do(shown):
    assert shown.title() == "fake | OmniServe"
    expect(chart(shown, "KV memory").locator(".entry", has_text="host tier")).to_contain_text("1.5 %")
    expect(tile(shown, "Host KV")).to_have_text("1.5 %")
    # Every control has a name, and the charts say in words what they show.
    for control in shown.locator("button, select, input, textarea").all():
        assert control.evaluate("e => e.labels?.length > 0 || e.textContent !== '' || e.ariaLabel")
    expect(chart(shown, "KV memory").get_by_role("img")).to_have_attribute(
        "aria-label", "KV memory in use: device tier 0 %, host tier 1.5 %"
    )


def test_page_follows_a_server_from_idleness_to_load_and_the_death_of_its_engine(start_server, open_page):
    flags = ("--ls-ttft-slo", "30", "--ls-tpot-slo", "0.000001", "--limit", "engine_restarts=1")
    server = start_server(*flags).wait_until_ready()
    page = live(open_page(server.url))
    # No error of predictions is shown.
    errors = chart(page, "Step times")
    expect(errors.locator(".nothing")).to_contain_text("the engine had nothing to do")
    expect(errors.locator(".nothing")).to_be_visible()
    expect(errors.locator(".entry", has_text="error")).to_have_text("error\u2013")
    expect(page.locator(".tile", has_text="none lately")).to_have_count(1)

    ttft = chart(page, "LS time to first token")
    expect(ttft.locator(".nothing")).to_be_visible()
    for _ in range(5):
        server.client().completions.create(model="fake", prompt="abc", max_tokens=20)
    expect(ttft.locator(".nothing")).to_be_hidden()
    expect(ttft.locator(".entry", has_text="SLO")).to_have_text("SLO30 s")
    expect(ttft.locator(".entry", has_text="p99")).to_contain_text("ms")
    drawn = "canvas => canvas.toDataURL()"
    before = ttft.locator("canvas").evaluate(drawn)
    expect(tile(page, "LS TTFT p99")).to_contain_text("ms")
    expect(page.locator(".tile", has_text="LS TTFT p99")).to_contain_text("within 30 s")
    expect(page.locator(".tile.bad", has_text="LS TPOT p99")).to_contain_text("over")
    expect(tile(page, "LS SLO kept")).to_have_text("0 %")
    canvas = ttft.locator("canvas").element_handle()
    page.wait_for_function("([canvas, before]) => canvas.toDataURL() !== before", arg=[canvas, before])

    with pytest.raises(Exception, match="engine"):
        server.client().completions.create(model="fake", prompt=[DIE], max_tokens=2)
    expect(page.locator("#status")).to_contain_text("No engine: the engine process died")
    expect(page.locator("#status")).to_have_text("Live, engine restarts: 1", timeout=TIMEOUT_MS)


def test_every_number_and_chart_says_what_it_means(shown):
    tiles = shown.locator(".tile").all()
    assert len(tiles) == 10
    for each in tiles:
        title = each.get_attribute("title")
        assert title and "undefined" not in title, each.inner_text()
    for figure in shown.locator("figure.chart").all():
        meaning = figure.locator(".meaning").inner_text()
        assert meaning.endswith(".") and "undefined" not in meaning, figure.inner_text()
    words = shown.locator("#words")
    expect(words).to_be_hidden()
    shown.get_by_text("What the words mean").click()
    for word in ("TTFT", "TPOT", "Attainment", "Piggyback row", "Device, host tier", "KV"):
        expect(words.locator("dt").get_by_text(word, exact=True)).to_be_visible()


def test_lines_of_a_chart_differ_in_more_than_color(shown):
    num_lines = []
    for figure in shown.locator("figure.chart").all():
        if "BE output" in figure.inner_text():  # stacked: no line can hide another
            continue
        lines = figure.locator(".legend line").all()
        dashes = [line.get_attribute("stroke-dasharray") for line in lines]
        assert len(set(dashes)) == len(dashes), figure.inner_text()
        num_lines.append(len(lines))
    assert num_lines == [3, 3, 2, 2, 4, 2, 1, 1]


def test_time_axis_has_several_times_at_any_width(shown):
    steps = shown.evaluate(
        """async () => {
          const { timeSteps } = await import("/dashboard/static/chart.js");
          const found = [];
          for (let width = 190; width < 700; width += 7) {
            for (const rangeS of [120, 300, 900]) found.push([width, rangeS, ...timeSteps(null, 0, 0, rangeS, width)]);
          }
          return found;
        }"""
    )
    for width, range_s, step_s in steps:
        assert range_s / step_s >= 2, (width, range_s, step_s)
        # "12:34:56" and "12:34" at 11 pixels.
        assert step_s * width / range_s >= (45 if step_s % 60 == 0 else 60), (width, range_s, step_s)
    assert all(range_s / step_s >= 4 for width, range_s, step_s in steps if width > 280)


def test_history_is_there_at_load(server, shown):
    deadline = time.monotonic() + 20
    while len((data := httpx.get(f"{server.url}/dashboard/data").json())["times"]) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    news = httpx.get(f"{server.url}/dashboard/data", params={"since": data["last"] - 2, "run": data["run"]}).json()
    assert news["times"][:2] == data["times"][-2:]
    times = shown.evaluate("async () => (await (await fetch('/dashboard/data?since=-1')).json()).times")
    # A server that other tests have used for longer than the history has dropped its oldest samples meanwhile.
    assert len(times) >= len(data["times"]) and data["times"][-1] in times


@pytest.mark.parametrize(("service_class", "api"), [("LS", "chat"), ("BE", "completion")])
def test_prompt_box_streams(shown, service_class, api):
    shown.select_option("#prompt-class", service_class)
    shown.select_option("#prompt-api", api)
    shown.fill("#prompt", ATTACK)
    shown.fill("#prompt-tokens", "120")
    shown.evaluate(
        """() => {
          const output = document.querySelector("#prompt-output");
          const found = (window.growths = []);
          new MutationObserver(() => found.push(output.textContent.length)).observe(output, { childList: true });
        }"""
    )
    sent = []
    shown.on("request", lambda request: request.method == "POST" and sent.append(request))
    shown.click("#prompt-send")
    result = shown.locator("#prompt-result")
    for part in (f"{service_class}: TTFT", "TPOT", "tokens, ended "):
        expect(result).to_contain_text(part)
    if service_class == "LS":
        expect(result).to_contain_text("predicted")
    assert sent[0].post_data_json["service_tier"] == service_class
    # Tokens of an LS request are written as they come; those of a BE request are collected, but for its first text.
    assert len(shown.evaluate("growths")) > (5 if service_class == "LS" else 1)
    # The fake engine repeats the prompt.
    expect(shown.locator("#prompt-output")).to_contain_text("<script>document.title=")
    assert shown.locator("#prompt-output *").count() == 0
    assert shown.title() == "fake | OmniServe"


# In the page: from here, a busy machine might press the button after the last token.
STOP_AT_THE_FIRST_TEXT = """() => {
  const output = document.querySelector("#prompt-output");
  new MutationObserver((_, observer) => {
    if (output.textContent === "") return;
    observer.disconnect();
    document.querySelector("#prompt-stop").click();
  }).observe(output, { childList: true });
}"""


def test_prompt_box_stops_and_tells_errors(troubled):
    troubled.fill("#prompt", "abc")
    troubled.fill("#prompt-tokens", "10000")
    assert not troubled.locator("#prompt-tokens").evaluate("e => e.checkValidity()")
    troubled.evaluate("document.querySelector('#prompt-form').noValidate = true")
    troubled.click("#prompt-send")
    expect(troubled.locator("#prompt-result.error")).to_contain_text("shorten the prompt or set max_tokens")
    troubled.fill("#prompt-tokens", "450")
    troubled.select_option("#prompt-api", "completion")
    troubled.evaluate(STOP_AT_THE_FIRST_TEXT)
    troubled.click("#prompt-send")
    expect(troubled.locator("#prompt-result")).to_contain_text("Stopped.")
    expect(troubled.locator("#prompt-send")).to_be_enabled()


ENDLESS_LINES = [completion_line(i, prompt=[SILENT, 100 + i]) for i in range(60)]


def test_batches_show_progress_and_cancel_after_a_second_press(start_server, open_page):
    server = start_server().wait_until_ready()
    page = live(open_page(server.url))
    hasten(page)
    expect(page.locator("#batches-empty")).to_contain_text("upload a JSONL file of requests to /v1/files")
    quick = submit(server.client(), [completion_line(1, prompt=[100, 101])])
    wait_for(server.client(), quick.id)
    endless = submit(server.client(), ENDLESS_LINES, metadata={ATTACK[:64]: ATTACK})
    rows = page.locator("#batches tbody tr")
    expect(rows).to_have_count(2)
    newest, oldest = rows.nth(0), rows.nth(1)
    expect(oldest).to_contain_text("completed")
    expect(oldest).to_contain_text("1 of 1")
    expect(oldest).to_contain_text("ended")
    expect(oldest.get_by_role("button")).to_have_count(0)
    expect(newest).to_contain_text(f"{ATTACK[:64]}: {ATTACK}")
    assert rows.locator("img, script").count() == 0 and page.title() == "fake | OmniServe"
    expect(newest).to_contain_text("of 60")
    expect(newest).to_contain_text("in 24 h")
    button = newest.get_by_role("button")
    button.click()
    expect(button).to_have_accessible_name(f"Sure? {endless.id}")
    assert server.client().batches.retrieve(endless.id).status in ("validating", "in_progress")
    button.click()
    expect(page.locator("#batches-message")).to_have_text(re.compile(f"{endless.id}: (cancelling|cancelled)"))
    expect(newest.locator(".badge")).to_have_text("cancelled", timeout=TIMEOUT_MS)
    assert server.client().batches.retrieve(endless.id).status == "cancelled"
    expect(button).to_have_count(0)
    page.close()
    assert server.stop() == 0


@pytest.mark.slow
def test_first_press_alone_cancels_nothing(start_server, open_page):
    server = start_server().wait_until_ready()
    endless = submit(server.client(), ENDLESS_LINES)
    page = live(open_page(server.url))
    button = page.locator("#batches tbody button")
    button.click()
    expect(button).to_have_text("Sure?")
    expect(button).to_have_text("Cancel", timeout=TIMEOUT_MS)
    assert server.client().batches.retrieve(endless.id).status == "in_progress"
    # A press on a button that the keyboard has reached does not lose its place when the list is renewed.
    button.focus()
    submit(server.client(), ENDLESS_LINES)
    expect(page.locator("#batches tbody tr")).to_have_count(2)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Cancel {endless.id}"
    page.close()
    assert server.stop() == 0


def test_unreachable_server_is_told_and_charts_go_on_afterwards(troubled):
    troubled.context.set_offline(True)
    expect(troubled.locator("#status")).to_contain_text("Reconnecting since")
    expect(troubled.locator("figure canvas")).to_have_count(9)
    troubled.context.set_offline(False)
    live(troubled)


@pytest.mark.slow
def test_page_survives_a_restart_of_the_server(start_server, open_page):
    server = start_server().wait_until_ready()
    page = live(open_page(server.url, problems_expected=True))
    assert server.stop() == 0
    expect(page.locator("#status")).to_contain_text("Reconnecting since")
    again = start_server("--port", str(urlsplit(server.url).port), "--ls-ttft-slo", "7").wait_until_ready()
    live(page)
    expect(chart(page, "LS time to first token").locator(".entry", has_text="SLO")).to_have_text("SLO7 s")
    assert again.stop() == 0


def test_what_a_restart_lost_stays_with_a_gap_behind_it(shown):
    times, values, queries = shown.evaluate(
        """async () => {
          const { Samples } = await import("/dashboard/static/samples.js");
          const samples = new Samples();
          const queries = [samples.query];
          const answer = { interval_s: 1, capacity: 6 };
          samples.add({ ...answer, run: "a", last: 2, times: [1, 2, 3], series: { x: [10, 20, 30] } });
          queries.push(samples.query);
          samples.add({ ...answer, run: "a", last: 2, times: [], series: {} });
          samples.add({ ...answer, run: "b", last: 1, times: [50, 51], series: { x: [1, 2], y: [5, 6] } });
          queries.push(samples.query);
          samples.add({ ...answer, run: "b", last: 2, times: [51], series: { x: [3], y: [7] } });
          samples.add({ ...answer, run: "b", last: 3, times: [52], series: { x: [4], y: [8] } });
          return [samples.times, [samples.column("x"), samples.column("y"), samples.column("z")], queries];
        }"""
    )
    assert queries == ["since=-1", "since=2&run=a", "since=1&run=b"]
    assert times == [2, 3, 4, 50, 51, 52]
    assert values == [[20, 30, None, 1, 3, 4], [None, None, None, 5, 7, 8], [None] * 6]


def test_key_is_asked_for_kept_in_the_tab_and_forgotten(start_server, open_page):
    server = start_server("--api-key", "open sesame", "--guard-all").wait_until_ready()
    assert httpx.get(f"{server.url}/dashboard/data").status_code == 401
    page = open_page(server.url, problems_expected=True)
    expect(page.locator("#key-form")).to_contain_text("Enter one that the server was started with")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#status")).to_have_text("Waiting for an API key")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("this API key is not known here")
    page.fill("#key", "open sesame")
    page.click("text=Use key")
    live(page)
    expect(page.locator("#key-form")).to_be_hidden()
    page.fill("#prompt", "abc")
    page.click("#prompt-send")
    expect(page.locator("#prompt-result")).to_contain_text("TPOT")
    live(page).reload()
    live(page)
    page.click("#forget-key")
    expect(page.locator("#key-form")).to_be_visible()
    page.reload()
    expect(page.locator("#key-form")).to_be_visible()
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0


SHADES = {"light": "rgb(244, 245, 247)", "dark": "rgb(18, 21, 26)"}


def show_scheme(page: sync_api.Page, scheme: str) -> None:
    """Have the system ask for a scheme, which the page takes over a moment later."""
    page.emulate_media(color_scheme=scheme)
    expect(page.locator("body")).to_have_css("background-color", SHADES[scheme])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_and_the_button(shown, scheme):
    show_scheme(shown, scheme)
    for chosen in ("light", "dark"):
        shown.click("#theme")
        expect(shown.locator("#theme")).to_have_text(f"Theme: {chosen}")
        expect(shown.locator("body")).to_have_css("background-color", SHADES[chosen])
    background = "getComputedStyle(document.body).backgroundColor"
    shown.reload()
    assert shown.evaluate(background) == SHADES["dark"], "from the start"
    shown.click("#theme")
    expect(shown.locator("body")).to_have_css("background-color", SHADES[scheme])
    shown.reload()
    assert shown.evaluate(background) == SHADES[scheme], "from the start"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(shown, scheme):
    show_scheme(shown, scheme)
    ratios = shown.evaluate(CONTRAST)
    assert ratios and min(ratio for _, ratio in ratios) >= 4.5, sorted(ratios, key=lambda pair: pair[1])[:5]


def test_each_engine_of_several_has_a_line_and_one_alone_has_none(start_server, shown, open_page):
    expect(shown.locator("#engines-panel")).to_be_hidden()
    server = start_server("--replicas", "2", "--router", "round-robin", "--limit", "engine_restarts=1")
    page = live(open_page(server.wait_until_ready().url))
    rows = page.locator("#engines tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("engine 1")
    for row in rows.all():
        expect(row.locator(".badge")).to_have_text("up")
        expect(row).to_contain_text("0 LS, 0 BE")
        expect(row).to_contain_text("256 s", timeout=TIMEOUT_MS)  # of 1,024 tokens
        expect(row).to_contain_text("device 0 %, host 1.5 %")
    for _ in range(3):
        server.client().completions.create(model="fake", prompt=[5], max_tokens=3)
    expect(rows.nth(0).locator("td").nth(6)).to_contain_text("2")
    expect(rows.nth(1).locator("td").nth(6)).to_contain_text("1")
    for scheme in ("light", "dark"):
        show_scheme(page, scheme)
        ratios = page.evaluate(CONTRAST)
        assert min(ratio for _, ratio in ratios) >= 4.5, sorted(ratios, key=lambda pair: pair[1])[:5]
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    with pytest.raises(Exception, match="engine"):
        server.client().completions.create(model="fake", prompt=[DIE], max_tokens=2)
    expect(page.locator("#engines .badge[data-status='completed']")).to_have_count(2, timeout=TIMEOUT_MS)
    restarts = page.locator("#engines tbody tr td:last-child")
    expect(restarts).to_contain_text(["1", "1"], timeout=TIMEOUT_MS)  # the call killed both


CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.disabled)
    .filter((e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((e) => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
      return [e.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)];
    });
}"""


def test_nothing_is_wider_than_the_window_and_nothing_moves_on_its_own(server, open_page):
    pages = {}
    for width in (390, 768, 1280):
        pages[width] = open_page(server.url, viewport={"width": width, "height": 844})
        pages[width].evaluate(
            """() => {
              window.shift = 0;
              new PerformanceObserver((list) => list.getEntries().forEach((entry) => (shift += entry.value)))
                .observe({ type: "layout-shift", buffered: true });
            }"""
        )
    for page in pages.values():
        live(page)
    page.wait_for_timeout(1500)
    for page in pages.values():
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.evaluate("shift") < 0.02

    # On a phone the prompt box is at hand.
    phone = pages[390]
    box = phone.locator("#prompt-send").bounding_box()
    assert box is not None and box["y"] + box["height"] < 844
    phone.fill("#prompt", "abc")
    phone.click("#prompt-send")
    expect(phone.locator("#prompt-result")).to_contain_text("TPOT")
    expect(phone.locator("#prompt-output")).to_be_in_viewport()
    assert phone.evaluate("scrollY") == 0


def test_keyboard_reaches_everything_with_a_visible_focus(shown):
    shown.reload()
    live(shown)
    reached = set()
    for _ in range(20):
        shown.keyboard.press("Tab")
        element = shown.evaluate(
            "(({ id, className }) => [id || className, getComputedStyle(document.activeElement).outlineStyle])"
            "(document.activeElement)"
        )
        if element[0]:
            assert element[1] != "none", element
            reached.add(element[0])
    assert {"skip", "latency-class", "range", "theme", "prompt", "prompt-class", "prompt-send"} <= reached


def test_answers_forbid_what_the_page_does_not_need(server):
    for path in ("/dashboard", "/dashboard/static/app.js", "/dashboard/static/vendor/uplot/uPlot.iife.min.js"):
        answer = httpx.get(f"{server.url}{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        again = httpx.get(f"{server.url}{path}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
    for name in ("../pages.py", "%2e%2e/pages.py", "vendor", "nothing.js"):
        assert httpx.get(f"{server.url}/dashboard/static/{name}").status_code == 404
    wrong = httpx.get(f"{server.url}/dashboard/data?since=x")
    assert wrong.status_code == 400 and "number of the last sample" in wrong.json()["error"]["message"]


def test_wheel_carries_the_page():
    package = Path(omniserve.__file__).parent
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["omniserve"]
    carried = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    files = {path for path in (package / "server" / "dashboard" / "static").rglob("*") if path.is_file()}
    assert len(files) > 10 and files <= carried


def test_policy_stops_inline_code_and_html(troubled):
    troubled.evaluate("document.body.append(Object.assign(document.createElement('b'), { id: 'target' }))")
    with pytest.raises(sync_api.Error, match="TrustedHTML"):
        troubled.evaluate("document.querySelector('#target').innerHTML = '<i>x</i>'")
    with pytest.raises(sync_api.Error, match="TrustedScript"):
        troubled.evaluate("document.querySelector('#target').setAttribute('onclick', 'document.title = 1')")
    troubled.evaluate("document.body.append(Object.assign(document.createElement('style'), { textContent: '* {}' }))")
    assert troubled.evaluate("document.styleSheets.length") == 2
    assert troubled.title() == "fake | OmniServe"
