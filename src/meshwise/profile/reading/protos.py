"""Protocol buffers of XLA's profiler and of HLO, by descriptors that are made at run time from a few lines of text.

Only the fields that are read are declared; the parser skips all others. Not here: what they mean (`xplane`, `hlo`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, TypeAlias, cast

from meshwise.core.errors import MissingDependencyError

#: A message whose fields are known at run time only.
Message: TypeAlias = Any

#: Message -> fields as `name number type`; `*` repeats, other words are messages. From openxla/xla: xplane.proto,
#: hlo.proto, xla_data.proto; CoreDetails from openxla/xprof: op_stats.proto.
_MESSAGES = {
    "XSpace": "planes 1 *XPlane, errors 2 *str, hostnames 4 *str",
    "XPlane": "id 1 int, name 2 str, lines 3 *XLine, event_metadata 4 *EventEntry, stat_metadata 5 *StatEntry,"
    "stats 6 *XStat",
    "EventEntry": "key 1 int, value 2 XEventMetadata",
    "StatEntry": "key 1 int, value 2 XStatMetadata",
    "XLine": "id 1 int, name 2 str, timestamp_ns 3 int, events 4 *bytes, duration_ps 9 int, display_name 11 str",
    "XEvent": "metadata_id 1 int, offset_ps 2 int, duration_ps 3 int, stats 4 *XStat, num_occurrences 5 int",
    "XStat": "metadata_id 1 int, double_value 2 double, uint64_value 3 uint, int64_value 4 int, str_value 5 str,"
    "bytes_value 6 bytes, ref_value 7 uint",
    "XEventMetadata": "id 1 int, name 2 str, display_name 4 str, stats 5 *XStat",
    "XStatMetadata": "id 1 int, name 2 str",
    "HloProto": "hlo_module 1 HloModule",
    "HloModule": "name 1 str, entry_computation_name 2 str, computations 3 *HloComputation, id 5 int,"
    "entry_computation_id 6 int, schedule 7 HloSchedule, device_assignment 15 DeviceAssignment",
    "HloSchedule": "sequences 1 *HloSequenceEntry",
    "HloSequenceEntry": "key 1 int, value 2 HloSequence",
    "HloSequence": "instruction_ids 1 *int",
    "DeviceAssignment": "replica_count 1 int, computation_count 2 int, computation_devices 3 *ComputationDevices",
    "ComputationDevices": "replica_device_ids 1 *int",
    "CoreDetails": "device_ordinal 2 int, core_num 3 int, local_chip_id 4 int, global_chip_id 5 int,"
    "global_core_id 6 int",
    "HloComputation": "name 1 str, instructions 2 *HloInstruction, id 5 int, root_id 6 int",
    "HloInstruction": "name 1 str, opcode 2 str, shape 3 Shape, metadata 7 OpMetadata, window 15 Window,"
    "convolution_dimension_numbers 16 ConvolutionDimensions, custom_call_target 28 str, dot_dimension_numbers 30"
    " DotDimensions, id 35 int, operand_ids 36 *int, called_computation_ids 38 *int, replica_groups 49 *ReplicaGroup,"
    "backend_config 43 bytes, fusion_kind 11 str, feature_group_count 50 int, source_target_pairs 52 *Pair,"
    "collective_device_list 87 DeviceList, iota_groups 92 IotaGroups, mesh_axes_groups 93 MeshGroups",
    "Shape": "element_type 2 int, dimensions 3 *int, tuple_shapes 4 *Shape",
    "OpMetadata": "op_type 1 str, op_name 2 str, source_file 3 str, source_line 4 int",
    "Window": "dimensions 1 *WindowDimension",
    "WindowDimension": "size 1 int, stride 2 int, padding_low 3 int, window_dilation 5 int, base_dilation 6 int",
    "ConvolutionDimensions": "kernel_input_feature_dimension 3 int, kernel_output_feature_dimension 4 int,"
    "input_batch_dimension 7 int, input_feature_dimension 8 int, output_batch_dimension 9 int,"
    "output_feature_dimension 10 int, kernel_spatial_dimensions 6 *int, input_spatial_dimensions 11 *int,"
    "output_spatial_dimensions 12 *int",
    "DotDimensions": "lhs_contracting_dimensions 1 *int, rhs_contracting_dimensions 2 *int,"
    "lhs_batch_dimensions 3 *int, rhs_batch_dimensions 4 *int",
    "ReplicaGroup": "replica_ids 1 *int",
    "MeshGroups": "mesh 1 Mesh, axes 2 *AxisRef",
    "Mesh": "axes 1 *MeshAxis, device_ids 2 *int",
    "MeshAxis": "name 1 str, size 2 int",
    "AxisRef": "mesh_axis_index 1 int, sub_axis 2 SubAxis",
    "SubAxis": "pre_size 1 int, size 2 int",
    "Pair": "source 1 int, target 2 int",
    "DeviceList": "replica_groups 1 *ReplicaGroup, iota_replica_group_list 2 IotaGroups",
    "IotaGroups": "num_replica_groups 1 int, num_devices_per_group 2 int, iota_reshape_dims 3 *int,"
    "iota_transpose_perm 4 *int",
}
_PACKAGE = "meshwise.profile"


class _Parser(Protocol):
    """A message class."""

    def FromString(self, data: bytes) -> Message:  # noqa: N802  (the library's name)
        """Parse."""


class BrokenProtoError(ValueError):
    """Bytes that are no such message."""


@cache
def _classes() -> dict[str, _Parser]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            "xplane traces are read with protobuf, which is not installed: pip install 'meshwise[profile]'"
        ) from error
    field = descriptor_pb2.FieldDescriptorProto
    types = {"int": field.TYPE_INT64, "uint": field.TYPE_UINT64, "double": field.TYPE_DOUBLE, "str": field.TYPE_STRING,
             "bytes": field.TYPE_BYTES}  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="meshwise_profile.proto", package=_PACKAGE, syntax="proto2")
    for name, text in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in text.split(","):
            label, number, kind = entry.split()
            repeats, kind = kind.startswith("*"), kind.lstrip("*")
            added = message.field.add(
                name=label, number=int(number), label=field.LABEL_REPEATED if repeats else field.LABEL_OPTIONAL
            )
            if kind in types:
                added.type = types[kind]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in _MESSAGES}


def parse(kind: str, data: bytes) -> Message:
    """Parse bytes as a message.

    Raises:
        BrokenProtoError: they are none.
        MissingDependencyError: protobuf is not installed.
    """
    try:
        return cast("Message", _classes()[kind].FromString(data))
    except MissingDependencyError:
        raise
    except Exception as error:  # google.protobuf.message.DecodeError, which cannot be named without importing it
        raise BrokenProtoError(str(error)) from error
