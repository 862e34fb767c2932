"""`--transformer-impl local --spec flux_megatron.specs flux_layer_spec`: our layers in a launch
that cannot go through `flux_megatron.launch`.

Megatron imports this once its arguments are parsed, and takes the name out of the module's
dictionary: so it is made at import, and only there.
"""

from flux_megatron.versions import megatron_core

megatron_core.check()  # before the next line imports it

from flux_megatron.integration.spec_argument import layer_spec_of_this_run  # noqa: E402

flux_layer_spec = layer_spec_of_this_run()
