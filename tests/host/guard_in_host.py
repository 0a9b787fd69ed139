"""NaN Guard on the host's objects; tests/host/test_guard.py reads the results.

python tests/host/guard_in_host.py HOST_FOLDER RESULT.json CHECKPOINT_FOLDER
"""

from guard_clip_in_host import (
    clip_input_is_not_blamed_on_a_layer,
    clip_overflow,
    clip_poisoned,
    clip_that_the_file_lacks,
    encoded,
    text_encoders,
)
from guard_model_in_host import (
    drawn,
    model_between_two_steps,
    model_input_is_not_blamed_on_a_layer,
    model_overflow,
    model_reports_only,
    model_stops_at_a_poisoned_weight,
    model_that_fp32_cannot_help,
    unet,
)
from guard_probes import RERUN, STOP, Counted, guard_of, same
from guard_vae_in_host import (
    LAYERS,
    an_fp32_half_goes_with_its_prompt,
    newer_hosts_write_into_a_buffer,
    objects_go_when_nobody_uses_them,
    one_sentence_for_many_tiles,
    overflowing,
    vae,
    vae_composes_with_select,
    vae_that_cannot_be_run_again,
)
from in_host import write_results  # noqa: E402  (boots the host)
from precision_nodes import guard_clip, guard_model, guard_vae, guards


def two_guards_are_the_last_one():
    vae, model, clip = overflowing(), unet(), text_encoders()
    first, last = guards.Guard(STOP), guards.Guard(RERUN)
    twice = guard_vae(guard_vae(vae, first), last).first_stage_model
    text = guard_clip(guard_clip(clip, first), last).cond_stage_model
    return {
        "vae": guard_of(twice).guard is last and guard_of(twice).source is vae,
        "one subclass": type(twice).__bases__ == (type(vae.first_stage_model),),
        "model": [
            w.guard is last
            for w in guard_model(guard_model(model, first), last).get_all_wrappers("apply_model")
        ],
        "clip": guard_of(text).guard is last and type(text).__bases__ == (type(clip.cond_stage_model),),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- cost


def nothing_is_hooked_while_all_is_finite():
    model, clip = unet(), text_encoders()
    found = {}
    for name, plain, watched, work in (
        ("model", model, guard_model(model, guards.Guard(RERUN)), drawn),
        ("clip", clip, guard_clip(clip, guards.Guard(RERUN)), lambda clip: encoded(clip)[0]),
    ):
        with Counted() as alone:
            wanted = work(plain)
        with Counted() as guarded:
            got = work(watched)
        found[name] = [same(got, wanted), alone.calls == guarded.calls > 0, guarded.hooks]
    return found


CHECKS = {name: lambda name=name: vae(name) for name in LAYERS} | {
    check.__name__: check
    for check in (
        model_stops_at_a_poisoned_weight,
        model_overflow,
        model_reports_only,
        model_input_is_not_blamed_on_a_layer,
        model_that_fp32_cannot_help,
        model_between_two_steps,
        vae_composes_with_select,
        two_guards_are_the_last_one,
        objects_go_when_nobody_uses_them,
        an_fp32_half_goes_with_its_prompt,
        one_sentence_for_many_tiles,
        vae_that_cannot_be_run_again,
        newer_hosts_write_into_a_buffer,
        clip_poisoned,
        clip_that_the_file_lacks,
        clip_overflow,
        clip_input_is_not_blamed_on_a_layer,
        nothing_is_hooked_while_all_is_finite,
    )
}


if __name__ == "__main__":
    write_results(CHECKS)
