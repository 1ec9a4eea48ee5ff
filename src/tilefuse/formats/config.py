"""Where a checkpoint says how it was quantised, and typed access to what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilefuse.errors import FormatError
from tilefuse.formats.safetensors_map import read_json

CONFIG = "config.json"
SIDE_FILES = ("quantize_config.json", "quant_config.json")
"""Where AutoGPTQ and AutoAWQ kept their settings before `config.json` held them."""


class Settings:
    """A quantisation configuration: a JSON object and where it came from."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def override(self, raw: dict[str, Any]) -> Settings:
        """These settings with some keys replaced."""
        return Settings({**self.raw, **raw}, self.source)

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.raw.get(key) is not None:
                return key, self.raw[key]
        return keys[0], None

    def integer(self, *keys: str) -> int | None:
        """The first of ``keys`` that is set, an integer."""
        key, value = self._find(keys)
        if value is not None and type(value) is not int:
            raise FormatError(f"{self.source}: {key} = {value!r} is not an integer")
        return value

    def flag(self, *keys: str) -> bool | None:
        """The first of ``keys`` that is set, a boolean."""
        key, value = self._find(keys)
        if value is not None and type(value) is not bool:
            raise FormatError(f"{self.source}: {key} = {value!r} is not true or false")
        return value

    def text(self, *keys: str) -> str | None:
        """The first of ``keys`` that is set, a string, in lower case (AutoAWQ wrote both "GEMM" and "gemm")."""
        key, value = self._find(keys)
        if value is not None and not isinstance(value, str):
            raise FormatError(f"{self.source}: {key} = {value!r} is not a string")
        return None if value is None else value.lower()

    def table(self, key: str) -> dict[str, Any]:
        """An object, empty if ``key`` is not set."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"{self.source}: {key} = {value!r} is not an object")
        return value or {}

    @property
    def method(self) -> str:
        """The quantisation method, in lower case; empty when there is no configuration."""
        named = self.text("quant_method")
        if named:
            return named
        if "w_bit" in self.raw or "q_group_size" in self.raw:
            return "awq"
        if "config_groups" in self.raw:
            return "compressed-tensors"
        if "bits" in self.raw and ("desc_act" in self.raw or "sym" in self.raw):
            return "gptq"
        if self.raw:
            raise FormatError(f"{self.source}: quant_method is missing, and the other settings do not tell it")
        return ""


def load(directory: Path, metadata: dict[str, str], given: Mapping[str, Any] | None) -> tuple[dict[str, Any], Settings]:
    """The model's `config.json` (empty if there is none) and its quantisation settings (empty if unquantised).

    Settings that are ``given`` take the place of those in the files.
    """
    path = directory / CONFIG
    config = read_json(path) if path.is_file() else {}
    if given is not None:
        return config, Settings(dict(given), "the argument quantization")
    text_config = config.get("text_config")
    for holder in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key) is not None:
                return config, Settings(_object(holder[key], f"{path}: {key}"), f"{path}: {key}")
    for name in SIDE_FILES:
        if (directory / name).is_file():
            return config, Settings(read_json(directory / name), str(directory / name))
    embedded = metadata.get("quantization_config")
    if embedded is not None:
        try:
            return config, Settings(_object(json.loads(embedded), "metadata"), "quantization_config in the metadata")
        except (ValueError, RecursionError) as error:
            raise FormatError(f"quantization_config in the metadata is not a JSON object ({error})") from None
    return config, Settings({}, "")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is not an object")
    return value
