"""Chat templates in the styles of well-known families, written for these tests, each with `{% generation %}` marks.

The marks hold what the model itself would have generated. Without them (`unmarked`), the same has to be found from outside.
"""

import re
from datetime import date

from layertap.chat_templates import variables

TODAY = {"strftime_now": date(2026, 1, 2).strftime}


def applied(tokenizer, messages, tools=None, **options):
    """The chat as transformers renders it, on a day that doesn't change."""
    with variables(tokenizer, TODAY, tools=tools) as plain:
        return tokenizer.apply_chat_template(messages, tools=tools, **options, **plain)


CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Reasoning only behind the last question, inline or as a field; calls as JSON; answers of tools as a user's turn.
QWEN = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}
"""

# A date in the system turn, trimmed contents, a call of its own form.
LLAMA3 = """
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}
{{- '}<|eom_id|>' }}
{%- else %}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endgeneration %}
{%- else %}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# No header of the assistant's turn; the system prompt moves to the last user turn.
MISTRAL = """
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + message.content + ' [/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{%- generation %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- endgeneration %}
{%- else %}
{%- generation %}{{- ' ' + (message.content | trim) + eos_token }}{%- endgeneration %}
{%- endif %}
{%- endfor %}
"""

# The assistant is called model; the system prompt stands in the first user turn.
GEMMA = """
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if loop.first %}{{- system }}{%- endif %}
{%- if message.role == 'assistant' %}
{%- generation %}{{- (message.content | trim) + '<end_of_turn>' }}{%- endgeneration %}
{%- else %}
{{- (message.content | trim) + '<end_of_turn>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# The generation prompt opens the reasoning, which the history doesn't show.
DEEPSEEK = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'tool' %}{{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}
{%- elif message.tool_calls %}
{{- '<|Assistant|>' }}
{%- generation %}
{{- '<|tool_calls_begin|>' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '<|tool_sep|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_end|>' + eos_token }}
{%- endgeneration %}
{%- else %}
{%- set content = message.content.split('</think>')[-1] if '</think>' in message.content else message.content %}
{{- '<|Assistant|>' }}{%- generation %}{{- content + eos_token }}{%- endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""

# Channels; several messages a turn; another end of turn in the history than at the end; tools answer under their name.
GPT_OSS = """
{{- '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set ns = namespace(tool='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|start|>assistant' }}
{%- generation %}
{%- if message.thinking and (loop.last or message.tool_calls) %}
{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
{%- endif %}
{%- if message.tool_calls %}
{%- set ns.tool = message.tool_calls[0].function.name %}
{{- ' to=functions.' + ns.tool + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson }}
{{- '<|call|>' }}
{%- else %}
{{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}
{%- endgeneration %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}
{{- '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# No end of a turn at all: the model stops by writing the header of the next.
HEADERS_ONLY = """
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content }}{%- endgeneration %}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

# Spaces around the content, which are the model's own: it goes on from [/INST].
LLAMA2 = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %}{{- ' ' + (message.content | trim) + ' ' + eos_token }}{%- endgeneration %}
{%- else %}
{{- bos_token + '[INST] ' + (message.content | trim) + ' [/INST]' }}
{%- endif %}
{%- endfor %}
"""

# The tokenizer's end of text behind all, unless another turn is to follow.
PHI3 = """
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|end|>' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "headers_only": HEADERS_ONLY,
    "llama2": LLAMA2,
    "phi3": PHI3,
}
TAKES_TOOLS = ("qwen", "llama3", "mistral", "deepseek", "gpt_oss")
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_calls_end|>", "<|tool_sep|>", "<|tool_call_end|>"),
    *("<|tool_output_begin|>", "<|tool_output_end|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def unmarked(template):
    """The same template without its marks."""
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


def chat_tokenizer(template):
    """The zoo's tokenizer with the special tokens of all styles."""
    from tokenizers import AddedToken

    from layertap.testing.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer.chat_template = template
    return tokenizer
