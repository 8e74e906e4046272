"""The page: all that a report says is on it, it needs nothing else, it stays small, and it takes text for text."""

import re
from html.parser import HTMLParser

import sample_events as sample

from ringverify.reports.page import LARGEST, page
from ringverify.reports.picture import picture
from ringverify.reports.results import results_of

VOID = {"meta", "link", "rect", "path", "circle", "use", "br"}


class Elements(HTMLParser):
    """Every element with its attributes, and all text; says if an element is not closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.text, self.loose = [], [], "", []
        self.feed(text)
        self.loose += self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.loose.append(tag)

    def handle_data(self, data):
        if not (self.open and self.open[-1] == "style"):
            self.text += data

    def ids(self):
        """Of all elements that have one."""
        return [attributes["id"] for _, attributes in self.found if "id" in attributes]


RESULTS = results_of(sample.typed(sample.everything()))
TEXT = page(RESULTS)
ELEMENTS = Elements(TEXT)
ROW = r"<tr[^>]*><th scope=\"row\">([^<]+)</th>(.*?)</tr>"


def test_the_page_is_well_formed():
    """Elements close where they opened, ids are unique, and every link within the page leads somewhere."""
    assert ELEMENTS.loose == []
    ids = ELEMENTS.ids()
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in ELEMENTS.found if tag in ("a", "use")}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_the_page_needs_nothing_else_and_runs_nothing():
    """No script, no address but links to click on, and a policy that forbids the rest."""
    tags = {tag for tag, _ in ELEMENTS.found}
    assert not tags & {"script", "img", "iframe", "object", "base", "form", "video", "audio"}
    for tag, attributes in ELEMENTS.found:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        if "src" in attributes or (tag != "a" and "href" in attributes):
            assert attributes.get("href", "").startswith(("#", "data:,"))
    assert "@import" not in TEXT
    assert re.findall(r"url\((?!#)", TEXT) == []
    policies = [a["content"] for tag, a in ELEMENTS.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0].startswith("default-src 'none'")


def test_every_verdict_is_in_the_matrix():
    """A row a property, a cell an implementation, with margin and examples."""
    cells = re.findall(r'<td class="(\w+)"', TEXT.split('class="matrix')[1].split("</table>")[0])
    expected = []
    for name in RESULTS.properties:
        for one in RESULTS.implementations:
            expected.append(one.outcomes[name].verdict.kind if name in one.outcomes else "none")
    assert cells == expected
    assert {"pass", "fail", "known", "unsupported", "inconclusive", "none"} == set(cells)


def test_every_failure_has_its_story_its_picture_its_case_and_its_replay_line():
    """As an article of its own, whatever the failure is."""
    articles = re.findall(r'<article id="(i\d+-\w+)".*?</article>', TEXT, re.DOTALL)
    assert articles == ["i1-forward", "i1-isolation", "i1-gradients", "i2-forward", "i2-progress"]
    for one in RESULTS.implementations:
        for outcome in one.failures:
            event = outcome.counterexample
            for said in (event.case_text, event.replay, event.diagnosis or ""):
                assert said in ELEMENTS.text, (one.name, outcome.id)
    assert TEXT.count('<svg class="map"') == 4
    assert "on rank 0 the part of rank 2's keys (hop 1) is missing" in ELEMENTS.text
    assert "baseline known.toml: determinism passes" in ELEMENTS.text


def test_what_was_tried_is_a_table_in_which_zeros_are_marked():
    """A row a feature, with its examples; blank where no example can have both. What was not tried is named above."""
    assert "Declared but in no example, so not tested: world size 3-4, softcap." in ELEMENTS.text
    (found,) = re.findall(r'<table class="tried">.*?</table>', TEXT, re.DOTALL)
    heads = re.findall(r"<span>([^<]+)</span></th>", found)
    assert heads == ["examples", "world size 1", "world size 2", "not causal", "causal", "window"]
    rows = {name: re.findall(r"<td( class=\"zero\")?>(\d*)</td>", row) for name, row in re.findall(ROW, found)}
    assert list(rows) == [*heads[1:5], "window left", "forward", "gradients"]
    assert [number for _, number in rows["world size 1"]] == ["10", "", "", "4", "6", "0"]
    assert [number for _, number in rows["forward"]] == ["20", "5", "15", "8", "12", "3"]
    zeros = [(name, number) for name, cells in rows.items() for marked, number in cells if marked]
    assert zeros == [("world size 1", "0"), ("window left", "0")]


def test_text_is_taken_for_text():
    """What an implementation says, and what it is called."""
    assert '<script>alert("1")</script> & "quotes"' in ELEMENTS.text
    assert "odd <b>name</b> & |pipe|" in ELEMENTS.text


def test_a_link_leads_only_where_a_page_may_lead():
    """A report from elsewhere may say anything."""
    name = "wrong_ring.attend"
    for link, led in (("javascript:alert(1)", False), ("https://example.org/", True)):
        known = {"reason": "because", "link": link}
        events = [sample.row(name, "forward", "fail", known=known), sample.counterexample(name, "forward")]
        text = page(results_of(sample.typed(sample.run({name: ("violations", events)}))))
        assert (f'href="{link}"' in text) is led
        assert link in Elements(text).text


def test_the_same_events_make_the_same_page():
    """A page is a function of the events."""
    assert page(results_of(sample.typed(sample.everything()))) == TEXT


def test_ten_implementations_that_fail_everywhere_fit_in_a_megabyte():
    """With the largest pictures that there can be: they become coarser."""
    text = page(results_of(sample.typed(sample.crowd(10))))
    assert len(text.encode()) <= LARGEST < 1_000_000
    assert text.count('<svg class="map"') == 10 * len(sample.PROPERTIES)
    assert Elements(text).loose == []


# -- pictures ----------------------------------------------------------------------------------------------------------


def drawn(**fields):
    """The picture of a counterexample."""
    return picture(*sample.typed([sample.counterexample("a", "forward", **fields)]))


def cells(svg, kind):
    """The cells of a kind, by column and row, of the first group that has some."""
    found = set()
    for path in re.findall(rf'<path class="{kind}" d="(M[\dMh ]+)"/>', svg)[:1]:
        for x, y, wide in re.findall(r"M(\d+) (\d+)h(\d+)", path):
            found |= {(int(x) + n, int(y)) for n in range(int(wide))}
    return found


def test_a_picture_shows_the_pattern_the_error_the_edges_and_the_hop():
    """Cells by query and key, an outline for the block that comes at the hop, a line between the shards."""
    svg = drawn().svg
    assert cells(svg, "p1") == {(0, 0), (0, 1), (1, 1)}
    assert cells(svg, "w3") == {(0, 1)}
    assert cells(svg, "w2") == {(1, 1)}
    outline = re.findall(r'<rect class="h" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"/>', svg)
    assert outline == [("74", "104", "60", "60")]
    assert ">hop 1<" in svg
    edges = re.search(r'<path class="e" d="([^"]+)"', svg).group(1)
    assert edges.startswith("M134 38v126M68 104h126")


def test_a_picture_says_where_it_goes_wrong_when_pairs_have_no_numbers():
    """The queries and keys of each pair of ranks are hatched, and the strip has the error by head."""
    shown = drawn(**sample.IN_BLOCKS)
    hatched = re.search(r'<path class="x" d="([^"]+)"', shown.svg).group(1)
    assert hatched == "M234 44h80v80h-80zM154 244h80v40h-80z"
    assert cells(shown.svg, "w1") == {(0, 0), (1, 0)}
    assert "Hatched: missing." in shown.caption
    assert '<circle class="o"' in shown.svg


def test_a_run_without_values_has_its_layout_drawn():
    """The rank that failed is hatched, and none is where all wait."""
    shown = drawn(**sample.DEADLOCK | {"rank": 1})
    assert '<path class="x" d="M74 104h120v60h-120z"/>' in shown.svg
    assert "Hatched: the queries of rank 1." in shown.caption
    assert 'class="x"' not in drawn(**sample.DEADLOCK).svg


def test_what_cannot_be_drawn_is_not_drawn():
    """No map, or an axis without positions."""
    assert drawn(region=None) is None
    assert drawn(region=sample.DEADLOCK["region"] | {"keys": []}) is None


def test_a_map_whose_digits_do_not_fit_its_axes_is_drawn_without_them():
    """The schema does not know how long the axes are."""
    region = sample.counterexample("a", "forward")["region"] | {"pairs": ["0"], "pattern": ["1111", "1"], "rows": []}
    svg = drawn(region=region).svg
    assert cells(svg, "p1") == cells(svg, "w3") == set()


def test_joined_cells_show_the_largest_error_and_keep_to_their_rank():
    """Half as many pieces an axis, and no piece of two ranks."""
    (event,) = sample.typed([sample.crowd(1)[2]])
    fine, coarse = picture(event), picture(event, most=12)
    assert len(coarse.svg) < len(fine.svg) / 2
    assert re.search(r'class="e" d="([^"]+)"', coarse.svg).group(1).count("v") == 4
