"""``vitlab completion``: the script for bash and zsh; it contains all word lists, so that TAB does not start Python."""

import sys

from vitlab.config.arguments import CommandParser, KeepLines, flags
from vitlab.shipped import HOME

SCRIPT = """# completion of vitlab for bash, and for zsh through bashcompinit; written by `vitlab completion`
if [ -n "${ZSH_VERSION-}" ]; then
  autoload -U +X compinit && compinit
  autoload -U +X bashcompinit && bashcompinit
fi
_vitlab() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=
  if [ "$cur" = "=" ]; then cur=; fi
  if [ "$prev" = "=" ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@COMMANDS@"
  else
    case "$prev" in
      -c|--config) words="@CONFIGS@" ;;
      --resume|--init_from) words="last $(ls runs 2>/dev/null)" ;;
      *)
        case "${COMP_WORDS[1]} $cur" in
          "fit -"*|"submit -"*|"validate -"*|"test -"*|"predict -"*) words="@KEYS@" ;;
          "runs "*) words="list show diff clean last $(ls runs 2>/dev/null)" ;;
          "validate "*|"test "*|"predict "*|"verify "*|"export "*|"analyze "*|"results "*)
            words="last $(ls runs 2>/dev/null)" ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _vitlab vitlab
"""

HOW_TO_COMPLETE = """for bash:
  vitlab completion bash > ~/.local/share/bash-completion/completions/vitlab
for zsh, with the line `source ~/.vitlab.zsh` in ~/.zshrc:
  vitlab completion zsh > ~/.vitlab.zsh"""


def main(args: list[str]) -> int:
    """Run ``vitlab completion SHELL``."""
    text = "Print the shell completion script."
    parser = CommandParser("vitlab completion", description=text, allow_abbrev=False, epilog=HOW_TO_COMPLETE)
    parser.formatter_class = KeepLines
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell; both use the same script")
    parser.parse_args(args)
    from vitlab.cli.main import COMMANDS  # which names this file

    sys.stdout.write(completion_script(list(COMMANDS)))
    return 0


def completion_script(commands: list[str]) -> str:
    """Return the script, for both shells.

    Args:
        commands: Names of all commands.
    """
    shipped = HOME / "configs"
    configs = sorted(path.relative_to(shipped).with_suffix("").as_posix() for path in shipped.rglob("*.yaml"))
    lists = {"COMMANDS": commands, "CONFIGS": configs, "KEYS": [f"--{key}" for key in flags()["keys"]]}
    text = SCRIPT
    for name, words in lists.items():
        text = text.replace(f"@{name}@", " ".join(words))
    return text
