"""``vitlab completion``: the script for bash and zsh; it contains all word lists, so that TAB does not start Python."""

import io
import re
import sys
from contextlib import redirect_stdout, suppress

from vitlab.config.arguments import CommandParser, KeepLines, flags
from vitlab.shipped import HOME

SCRIPT = """# completion of vitlab for bash, and for zsh through bashcompinit; written by `vitlab completion`
if [ -n "${ZSH_VERSION-}" ]; then
  autoload -U +X compinit && compinit
  autoload -U +X bashcompinit && bashcompinit
fi
_vitlab() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=
  local runs="last $(ls runs 2>/dev/null | grep -vxE 'ablations|slurm')"
  if [ "$cur" = "=" ]; then cur=; fi
  if [ "$prev" = "=" ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@COMMANDS@"
  else
    case "$prev" in
      -c|--config) words="@CONFIGS@" ;;
      --resume|--init_from) words=$runs ;;
      *)
        case "${COMP_WORDS[1]} $cur" in
@FLAGS@
          "analyze "*) if [ "$COMP_CWORD" -eq 2 ]; then words="all @ANALYSES@"; else words=$runs; fi ;;
          "ablate "*) if [ "$COMP_CWORD" -eq 2 ]; then words="@ABLATE@"; fi ;;
          "runs "*) words="@RUNS@ $runs" ;;
          "validate "*|"test "*|"predict "*|"embed "*|"look "*|"verify "*|"export "*|"results "*) words=$runs ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _vitlab vitlab
"""

CONFIGURED = ("validate", "test", "predict", "embed", "analyze", "look")  # take the keys of a configuration, too

HOW_TO_COMPLETE = """for bash:
  vitlab completion bash > ~/.local/share/bash-completion/completions/vitlab
for zsh, with the line `source ~/.vitlab.zsh` in ~/.zshrc:
  vitlab completion zsh > ~/.vitlab.zsh"""


def main(args: list[str]) -> int:
    """Run ``vitlab completion SHELL``."""
    text = "Print the shell completion script."
    parser = CommandParser("vitlab completion", description=text, epilog=HOW_TO_COMPLETE)
    parser.formatter_class = KeepLines
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell; both use the same script")
    parser.parse_args(args)
    sys.stdout.write(completion_script())
    return 0


def completion_script() -> str:
    """Return the script, for both shells."""
    from vitlab.analysis import ANALYSES
    from vitlab.cli.ablate import WORDS as ABLATE
    from vitlab.cli.main import COMMANDS  # which names this file
    from vitlab.cli.runs import WORDS as OF_RUNS

    shipped, keys = HOME / "configs", flags()["keys"]
    configs = sorted(path.relative_to(shipped).with_suffix("").as_posix() for path in shipped.rglob("*.yaml"))
    own = {command: _own_flags(command) for command in COMMANDS}
    own["ablate"] += [flag for word in ABLATE for flag in _own_flags("ablate", word)]
    own["runs"] += [flag for word in OF_RUNS for flag in _own_flags("runs", word)]
    own["fit"] = [f"--{key}" for key in keys]
    own["submit"] += own["fit"]
    for command in CONFIGURED:
        own[command] += [f"--{key}" for key in keys if "." in key]
    cases = [f'          "{command} -"*) words="{" ".join(dict.fromkeys(own[command]))}" ;;' for command in COMMANDS]
    lists = {"COMMANDS": [*COMMANDS], "CONFIGS": configs, "ANALYSES": [*ANALYSES], "ABLATE": [*ABLATE]}
    text = SCRIPT.replace("@FLAGS@", "\n".join(cases))
    for name, words in {**lists, "RUNS": [*OF_RUNS]}.items():
        text = text.replace(f"@{name}@", " ".join(words))
    return text


def _own_flags(*words: str) -> list[str]:
    """Return the flags of a command, as its help lists them."""
    from vitlab.cli.main import main as vitlab_main

    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        vitlab_main([*words, "--help"])
    return re.findall(r"^  (?:-\w[^,\n]*, )?(--\w+)", said.getvalue(), re.MULTILINE)
