"""The public names: read by type checkers, and by `__init__.py`, which imports each on first use."""

from apportion.backends.torch.envelope import Envelope as Envelope
from apportion.backends.torch.remap import from_linear as from_linear, to_linear as to_linear
from apportion.backends.torch.transport import Communicator as Communicator
from apportion.comparison import compare as compare
from apportion.ir.bytes.codec import Plan as Plan
from apportion.ir.bytes.iteration import IterationPlan as IterationPlan
from apportion.ir.bytes.job import Job as Job
from apportion.ir.bytes.slices import Slice as Slice
from apportion.ir.errors import (
    ApportionError as ApportionError,
    CapacityError as CapacityError,
    ConfigError as ConfigError,
    DecodeError as DecodeError,
    ExecutionError as ExecutionError,
    MissingDependencyError as MissingDependencyError,
    UnknownNameError as UnknownNameError,
    VerifyError as VerifyError,
    VersionError as VersionError,
)
from apportion.ir.latent import Latent as Latent
from apportion.ir.masks import specs as _masks
from apportion.ir.plan.tables import Layout as Layout
from apportion.ir.request.batch import Batch as Batch
from apportion.ir.request.cluster import Cluster as Cluster
from apportion.ir.request.hardware import Hardware as Hardware
from apportion.ir.request.model import Model as Model
from apportion.ir.request.policy import Policy as Policy, Recipe as Recipe
from apportion.ir.request.recurrent import Recurrent as Recurrent
from apportion.ir.request.sequences import Sequence as Sequence
from apportion.ir.verify import verify as verify
from apportion.planner.api import plan as plan
from apportion.planner.forecast.choices import (
    recipe_parallelisms as recipe_parallelisms,
    static_grids as static_grids,
)
from apportion.planner.forecast.parallelism import Degrees as Degrees, Parallelism as Parallelism
from apportion.planner.forecast.run import forecast as forecast
from apportion.planner.forecast.training import Training as Training
from apportion.planner.iteration.iterate import plan_iteration as plan_iteration
from apportion.planner.iteration.ticks import (
    plan_tick as plan_tick,
    tick_batch as tick_batch,
    tick_table as tick_table,
)
from apportion.planner.simulate import simulate as simulate
from apportion.planner.simulate.pair.run import simulate_pair as simulate_pair
from apportion.service.client import Client as Client
from apportion.trainer import memory as memory, trees as trees
from apportion.trainer.loading.batch import PlannedBatch as PlannedBatch
from apportion.trainer.loading.fetching import PlanTimeoutError as PlanTimeoutError
from apportion.trainer.loading.loader import PlannedLoader as PlannedLoader
from apportion.trainer.loading.media import Media as Media
from apportion.trainer.loading.samples import Samples as Samples, StreamedLoader as StreamedLoader
from apportion.trainer.step.attention import (
    PlanHandle as PlanHandle,
    planned_attention as planned_attention,
    planned_attention_block as planned_attention_block,
    planned_latent_attention as planned_latent_attention,
)
from apportion.trainer.step.gradients import sum_gradients as sum_gradients
from apportion.trainer.step.loss import normalised_loss as normalised_loss
from apportion.trainer.step.moves import (
    EncoderFeed as EncoderFeed,
    Visible as Visible,
    gather_visible as gather_visible,
    move_rows as move_rows,
)
from apportion.trainer.step.pingpong import (
    PingPongLayer as PingPongLayer,
    ping_pong as ping_pong,
    ping_pong_attention as ping_pong_attention,
)
from apportion.trainer.step.projection import (
    HeadProjection as HeadProjection,
    LatentExpansion as LatentExpansion,
)
from apportion.trainer.step.recurrence import planned_conv as planned_conv, planned_scan as planned_scan
from apportion.trainer.ticks import TickPipeline as TickPipeline

__version__: str
__all__: list[str]
masks = _masks  # type checkers do not re-export a module imported under an alias
