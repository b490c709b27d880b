"""The page begins with what to deploy, above the table of accuracy."""

import dataclasses
import html
import re
from pathlib import Path

import pytest
from cards_of_results import ARTIFACT, INT8, OWN, TORCH, card_of

from swin_quant.report.page import page
from swin_quant.report.page.data import PageData
from swin_quant.report.verdict import card_verdict

pytest.importorskip("vl_convert")


@pytest.mark.slow
def test_what_to_deploy_stands_first_with_paths_from_the_page():
    record = {**ARTIFACT, "file": "x<1>_int8_openvino.onnx", "options": {"target": "openvino"}}
    scored = dataclasses.replace(card_of(TORCH, OWN, INT8), artifact=record)
    verdict = card_verdict(scored, Path("out/int8/x.json"), Path("out"))
    written = page([PageData("x", [scored, card_of(TORCH)], verdicts=[verdict])])
    assert verdict.deploy == f"int8/{record['file']}" and "2.0 times as fast as float32 on openvino" in verdict.summary
    first, rest = written.split('<section id="accuracy"')
    shown = html.unescape(re.sub("<[^>]+>", "", first))
    assert html.escape(verdict.deploy) in first and all(
        text in shown for text in (verdict.deploy, verdict.summary, verdict.next)
    )
    assert card_verdict(card_of(TORCH), Path("x.json"), Path()) is None, "a card without an artifact has no verdict"
    assert '<section id="deploy"' not in page([PageData("x", [card_of(TORCH)])])
