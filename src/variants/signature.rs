//! The parameters of kernels, as types. A signature is a struct of `src/params` if that is a kernel's only parameter, and a tuple if there
//! are several. The C++ text of a kernel's parameters comes from its signature, and so do the values that a launch takes.

// NOTE: the build script has modules of these names, with types of the same names.
use crate::params::*;
use crate::tma::TensorMap;

/// The type of one parameter of a kernel.
pub trait Parameter {
    /// The name of the type in C++.
    const TYPE: &'static str;
}

impl Parameter for TensorMap {
    const TYPE: &'static str = "CUtensorMap";
}

macro_rules! structs {
    ($($name:ident)*) => {
        $(impl Parameter for $name {
            const TYPE: &'static str = concat!("oxmoe::", stringify!($name));
        })*
    };
}

include!("structs.rs");

/// The parameters of a kernel, in their order.
pub trait Signature {
    /// The parameters in C++: (type, name).
    const PARAMETERS: &'static [(&'static str, &'static str)];
}

impl<P: Parameter> Signature for P {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[(P::TYPE, "p")];
}

/// Parameters of kernels that choose experts.
pub type SelectAndSort = (SelectParams, RouteParams);
/// Parameters of GEMMs that read weights through a tensor map.
pub type MappedGemm = (TensorMap, GroupedGemmParams);
/// Parameters of GEMMs that read weights and tokens through tensor maps.
pub type OrderedGemm = (TensorMap, TensorMap, OrderedGemmParams);
/// Parameters of layers in one launch, with maps of both weights.
pub type Layer = (TensorMap, TensorMap, LayerParams);
/// Parameters of layers in one launch with the routing inside, with maps of both weights.
pub type RoutedLayer = (TensorMap, TensorMap, RoutedLayerParams);

/// Two maps and a struct, with the maps' names.
macro_rules! behind_two_maps {
    ($signature:ty, $params:ty, $first:literal, $second:literal) => {
        impl Signature for $signature {
            const PARAMETERS: &'static [(&'static str, &'static str)] =
                &[(TensorMap::TYPE, $first), (TensorMap::TYPE, $second), (<$params>::TYPE, "p")];
        }
    };
}

behind_two_maps!(OrderedGemm, OrderedGemmParams, "weights", "tokens");
behind_two_maps!(Layer, LayerParams, "up_weights", "down_weights");
behind_two_maps!(RoutedLayer, RoutedLayerParams, "up_weights", "down_weights");

impl Signature for SelectAndSort {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[(SelectParams::TYPE, "s"), (RouteParams::TYPE, "p")];
}

impl Signature for MappedGemm {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[(TensorMap::TYPE, "weights"), (GroupedGemmParams::TYPE, "p")];
}
