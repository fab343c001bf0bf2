"""What completes words in a shell.

Bash's own is written here: readline breaks words at ":" and "=", so that a cluster or a format would come in pieces.
Not here: which words there are (`options`).
"""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, get_completion_class

#: The whole line is split at blanks; of an answer what stands before the last break is left out, as readline keeps it.
_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} words word breaks="" before="" type value
    IFS=$' \\t' read -ra words <<< "$line"
    [[ $line == *[[:blank:]] ]] && words+=("")
    word=${words[-1]}
    [[ $COMP_WORDBREAKS == *:* ]] && breaks=:
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+==
    [[ -n $breaks && $word == *[$breaks]* ]] && before=${word%%"${word##*[$breaks]}"}
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1")
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    source_template = _BASH


def completion_script(shell: str) -> str:
    """What bash, zsh or fish is to read, so that it completes the words of `meshwise`."""
    kind = _Bash if shell == "bash" else get_completion_class(shell)
    assert kind is not None, f"click completes {shell}"
    return kind(click.Command("meshwise"), {}, "meshwise", "_MESHWISE_COMPLETE").source()
