"""What `gemmpipe --help` prints."""

from gemmpipe.cli.folders import Folders, title

_HEAD = """gemmpipe: from a model and a kernel to tuned artifacts that inference engines load

  gemmpipe kernel=KERNEL shapes=SHAPES ...             the default pipeline, tune
  gemmpipe PIPELINE key=value ...                      another pipeline
  gemmpipe path/to/recipe.yaml key=value ...           a command line written down
  gemmpipe -m kernel=ONE,ANOTHER ...                   a sweep, one run each
  gemmpipe resume=last                                 go on after a kill
"""
_FLAGS = """flags
  -m, --multirun           a sweep over values with commas
  --config-dir DIR         a folder of your own options, pipelines and Python
  --cfg job                print the configuration, run nothing (--cfg job -p space: a part of it)
  --info                   print where the configuration comes from
  -sc install=bash         print the completion for a shell: eval "$(gemmpipe -sc install=bash)"
  --version, --help, --hydra-help

Every value is an override: shapes.tp=4 'shapes.nsets=[1,64]' 'space.num_stages=[3,4]' stages.screen.keep=8
Exit codes: 0 done, 1 a problem without a valid candidate, 2 a mistake in the words, 3 the machine, 130 interrupted
"""


def usage(folders: Folders) -> str:
    """The help text, with the pipelines and the options that there are."""
    pipelines = "\n".join(f"  {name:<12} {title(path)}" for name, path in folders.pipelines.items())
    options = "\n".join(f"  {group:<12} {', '.join(names)}" for group, names in folders.options.items())
    return f"{_HEAD}\npipelines\n{pipelines}\n\noptions (group=option)\n{options}\n\n{_FLAGS}"
