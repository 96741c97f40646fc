"""Private names of lm-eval: how it finds, reads and builds tasks, and the environment of its templates."""

from typing import TYPE_CHECKING

from headscope.compat.library_name import Library, LibraryName

if TYPE_CHECKING:
    from lm_eval.tasks._index import Entry as Entry

LM_EVAL = Library("lm_eval", ("0.4.13",))
TASKS = "the tasks of headscope evaluate"

TASK_FACTORY = LibraryName(LM_EVAL, "lm_eval.tasks._factory:TaskFactory", TASKS, ("meta",))
TASK_INDEX = LibraryName(LM_EVAL, "lm_eval.tasks._index:TaskIndex", TASKS)
ENTRY_KIND = LibraryName(LM_EVAL, "lm_eval.tasks._index:Kind", TASKS)
LOAD_YAML = LibraryName(LM_EVAL, "lm_eval.tasks._yaml_loader:load_yaml", TASKS, ("resolve_func", "recursive"))
FUNCTION_CONSTRUCTOR = LibraryName(LM_EVAL, "lm_eval.tasks._yaml_loader:_mk_function_ctor", TASKS)
TEMPLATE_ENVIRONMENT = LibraryName(LM_EVAL, "lm_eval.utils:env", TASKS)
METRICS = LibraryName(LM_EVAL, "lm_eval.api.registry:METRIC_REGISTRY", TASKS)
