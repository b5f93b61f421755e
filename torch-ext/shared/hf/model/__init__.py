"""The forwards of whole models: padding left out, logits that are not made, and TRL's losses."""
