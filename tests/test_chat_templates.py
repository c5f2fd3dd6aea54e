"""A clock that is given to a template stands still in its rendering and nowhere else, with every version of transformers."""

from datetime import datetime

import pytest
from transformers.utils import chat_template_utils

from layertap.chat_templates import variables
from layertap.errors import PromptError
from layertap.testing.tokenizer import byte_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ strftime_now('%d %b %Y') }} {{ name }}{% for m in messages %} {{ m.content }}{% endfor %}"
CLOCK = datetime(2001, 2, 3).strftime


def rendered(given, template=TEMPLATE):
    tokenizer = byte_tokenizer()
    with variables(tokenizer, given, chat_template=template) as plain:
        return tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False, **plain)


def test_a_given_clock_is_the_templates_and_other_variables_stay():
    assert rendered({"strftime_now": CLOCK, "name": "Ada"}) == "03 Feb 2001 Ada hi"


def test_the_next_rendering_has_its_own_clock_again():
    assert rendered({"strftime_now": CLOCK, "name": "x"}).startswith("03 Feb 2001")
    assert not rendered({"name": "x"}).startswith("03 Feb 2001")
    assert rendered({"strftime_now": datetime(2002, 3, 4).strftime}).startswith("04 Mar 2002")


def test_a_clock_inside_of_another_ones_rendering_ends_with_its_own():
    tokenizer = byte_tokenizer()
    with variables(tokenizer, {"strftime_now": CLOCK}, chat_template=TEMPLATE) as plain:
        assert rendered({"strftime_now": datetime(2002, 3, 4).strftime}).startswith("04 Mar 2002")
        text = tokenizer.apply_chat_template(CHAT, chat_template=TEMPLATE, tokenize=False, **plain)
    assert text.startswith("03 Feb 2001")


def test_a_function_that_templates_are_not_given_is_refused_where_it_would_become_text():
    template = "{{ shout('hi') }}"
    if hasattr(chat_template_utils, "_plain_template_data"):  # from 5.23 on
        with pytest.raises(PromptError, match="chat_template_kwargs: shout: transformers from 5.23 on"):
            rendered({"shout": str.upper, "strftime_now": CLOCK}, template)
    else:
        assert rendered({"shout": str.upper}, template) == "HI"


def test_a_variable_with_a_field_of_its_own_is_refused():
    with pytest.raises(
        PromptError, match="chat_template_kwargs: 'tools', 'tokenize' has an option or a field of its own"
    ):
        rendered({"tools": [], "name": "x", "tokenize": True})
